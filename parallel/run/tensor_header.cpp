#include <tessera/parallel/run/tensor_header.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>
#include <variant>

#include <tessera/dtensor/api.h>

namespace tessera::internal::pipeline {

namespace {

/// `mesh` as a slice of the pipeline's root, where that has an equal one: specs are shared by equal meshes of several roots.
DeviceMesh in_root_of(const DeviceMesh& pipeline, const DeviceMesh& mesh) {
  const auto root = pipeline.root();
  const auto& names = root.dim_names();
  const bool has_all = std::all_of(mesh.dim_names().begin(), mesh.dim_names().end(),
                                   [&](const auto& name) { return std::count(names.begin(), names.end(), name) > 0; });
  if (mesh.root() == root || mesh.dim_names().empty() || !has_all) return mesh;
  const auto slice = root[mesh.dim_names()];
  return slice == mesh ? slice : mesh;
}

HeaderLayout layout_of(const DTensor& tensor, const DeviceMesh& pipeline, const std::string& what) {
  const auto mesh = in_root_of(pipeline, tensor.mesh());
  TORCH_CHECK(mesh.root() == pipeline.root(), what, " has a DTensor on ", mesh.to_string(),
              ", which is no slice of the mesh that the pipeline's is a slice of");
  HeaderLayout layout{.sizes = tensor.sizes().vec()};
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const auto root_dim = mesh.root_dim(dim);
    TORCH_CHECK(root_dim && !pipeline.root().dim_names().empty(), what, " has a DTensor on ", mesh.to_string(), ", whose dim ",
                dim, " is no named dim of the root mesh");
    layout.dims.push_back(pipeline.root().dim_names()[static_cast<size_t>(*root_dim)]);
    layout.names.push_back(mesh.dim_names().empty() ? layout.dims.back() : mesh.dim_names()[static_cast<size_t>(dim)]);
    const auto& placement = tensor.placements()[static_cast<size_t>(dim)];
    const auto* const shard = std::get_if<Shard>(&placement);
    TORCH_CHECK(shard || std::holds_alternative<Replicate>(placement), what, " has a DTensor with the placement ",
                to_string(placement), ": Replicate and Shard alone can go from stage to stage");
    layout.shards.push_back(shard ? shard->dim : -1);
  }
  return layout;
}

/// The mesh here that is as the sender's.
DeviceMesh mesh_of(const HeaderLayout& layout, const DeviceMesh& pipeline) {
  const auto root = pipeline.root();
  if (layout.names == layout.dims) return root[layout.dims];
  std::vector<DeviceMesh> parts;
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    const auto part = root[layout.dims[i]];
    parts.push_back(layout.names[i] == layout.dims[i] ? part : part.flatten(layout.names[i]));
  }
  return parts.size() == 1 ? parts[0] : DeviceMesh::concatenate(parts);
}

template <typename Number>
void write(std::ostream& out, const std::vector<Number>& numbers) {
  out << numbers.size();
  for (const auto& each : numbers) out << ' ' << each;
  out << ' ';
}

template <typename Number>
std::vector<Number> read(std::istream& in) {
  size_t count = 0;
  in >> count;
  std::vector<Number> numbers(count);
  for (auto& each : numbers) in >> each;
  return numbers;
}

} // namespace

std::string TensorHeader::describe() const {
  if (!dtype) return "undefined";
  return c10::str(*dtype, c10::IntArrayRef(sizes), requires_grad ? " with a gradient" : "", layout ? " of a DTensor" : "");
}

std::string MessageHeader::to_text() const {
  std::ostringstream out;
  out << structure.size() << ' ' << structure << ' ' << numbers << ' ' << tensors.size() << ' ';
  for (const auto& each : tensors) {
    out << (each.dtype ? static_cast<int>(*each.dtype) : -1) << ' ' << each.requires_grad << ' ' << each.layout.has_value()
        << ' ';
    write(out, each.sizes);
    if (!each.layout) continue;
    write(out, each.layout->sizes);
    write(out, each.layout->dims);
    write(out, each.layout->names);
    write(out, each.layout->shards);
  }
  return std::move(out).str();
}

MessageHeader MessageHeader::of_text(const std::string& text) {
  std::istringstream in(text);
  MessageHeader header;
  size_t length = 0, count = 0;
  in >> length;
  in.get();
  header.structure.resize(length);
  in.read(header.structure.data(), static_cast<std::streamsize>(length));
  in >> header.numbers >> count;
  header.tensors.resize(count);
  for (auto& each : header.tensors) {
    int dtype = 0;
    bool has_layout = false;
    in >> dtype >> each.requires_grad >> has_layout;
    if (dtype >= 0) each.dtype = static_cast<c10::ScalarType>(dtype);
    each.sizes = read<int64_t>(in);
    if (!has_layout) continue;
    each.layout.emplace();
    each.layout->sizes = read<int64_t>(in);
    each.layout->dims = read<std::string>(in);
    each.layout->names = read<std::string>(in);
    each.layout->shards = read<int64_t>(in);
  }
  TORCH_INTERNAL_ASSERT(!in.fail(), "the header of a pipeline's message cannot be read: ", text);
  return header;
}

MessageHeader header_of(const FlatValue& value, const DeviceMesh& pipeline, const std::string& what) {
  MessageHeader header{.structure = value.structure, .numbers = std::ssize(value.numbers)};
  for (const auto& tensor : value.tensors) {
    auto& each = header.tensors.emplace_back();
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.layout() == c10::kStrided, what, " has a tensor of layout ", tensor.layout(),
                ": dense ones alone can go from stage to stage");
    each.dtype = tensor.scalar_type();
    each.requires_grad = tensor.requires_grad();
    if (is_dtensor(tensor)) each.layout = layout_of(DTensor(tensor), pipeline, what);
    each.sizes = is_dtensor(tensor) ? DTensor(tensor).local().sizes().vec() : tensor.sizes().vec();
  }
  return header;
}

at::Tensor payload_of(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? DTensor(tensor).local() : tensor.detach()).contiguous();
}

at::Tensor tensor_of(const at::Tensor& payload, const TensorHeader& header, const DeviceMesh& pipeline) {
  if (!header.layout) return payload.defined() ? payload.requires_grad_(header.requires_grad) : payload;
  Placements placements;
  for (const auto dim : header.layout->shards) placements.push_back(dim < 0 ? Placement(Replicate()) : Placement(Shard{dim}));
  const auto tensor = from_local(payload, mesh_of(*header.layout, pipeline), placements, header.layout->sizes);
  return tensor.detach().requires_grad_(header.requires_grad);
}

} // namespace tessera::internal::pipeline
