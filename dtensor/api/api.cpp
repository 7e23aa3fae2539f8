#include <tessera/dtensor/api.h>

#include <ATen/core/Formatting.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <sstream>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera {

bool is_dtensor(const at::Tensor& tensor) { return internal::dtensor_meta(tensor) != nullptr; }

DTensor::DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  const auto* meta = internal::dtensor_meta(*this);
  TORCH_CHECK(meta, "DTensor: this tensor is not a DTensor; make one with distribute_tensor or from_local");
  if (auto realized = meta->realized(); realized.defined()) at::Tensor::operator=(std::move(realized));
}

const Spec& DTensor::spec() const { return *internal::dtensor_meta(*this)->spec; }

at::Tensor DTensor::local() const {
  auto* meta = internal::dtensor_meta(*this);
  meta->check_has_values("local");
  return meta->local;
}

at::Tensor DTensor::full_tensor(const std::optional<Placements>& gradient_placements) const {
  internal::dtensor_meta(*this)->check_has_values("full_tensor");
  return to_local(redistribute(Placements(placements().size())), gradient_placements);
}

namespace {

/// Along one mesh dim, the first rank sends each rank its part. `whole` is only read there.
at::Tensor scatter(const at::Tensor& whole, const DeviceMesh& mesh, int64_t mesh_dim, const Placement& placement,
                   const std::string& label) {
  const auto ranks = mesh.size(mesh_dim), rank = mesh.local_rank(mesh_dim);
  const auto communicator = mesh.communicator(mesh_dim);
  if (!is_sharded(placement)) {
    auto buffer = whole.clone(at::MemoryFormat::Contiguous);
    communicator->broadcast(buffer.view(-1), 0, label).wait();
    return buffer;
  }
  auto output = at::empty(internal::redistribute::part_sizes(whole.sizes().vec(), placement, ranks, rank), whole.options());
  auto input = at::empty({0}, whole.options());
  std::vector<int64_t> input_splits(ranks, 0), output_splits(ranks, 0);
  output_splits[0] = output.numel();
  if (rank == 0) {
    std::vector<at::Tensor> parts;
    for (int64_t r = 0; r < ranks; ++r) {
      parts.push_back(internal::redistribute::part_of(whole, placement, ranks, r).reshape(-1));
      input_splits[r] = parts.back().numel();
    }
    input = at::cat(parts);
  }
  communicator->all_to_all(output.view(-1), input, output_splits, input_splits, label).wait();
  return output;
}

/// Mesh dims left to right; a rank takes part once the ranks that it receives from hold their part.
at::Tensor scatter(at::Tensor local, const Spec& spec) {
  const auto& mesh = spec.mesh();
  const auto label = "distribute_tensor: " + spec.to_string();
  int64_t merged = 0;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    auto placement = spec.placements()[i];
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim -= merged;
    if (auto* strided = std::get_if<StridedShard>(&placement)) strided->dim -= merged;
    if (auto* ragged = std::get_if<RaggedShard>(&placement)) {
      merged = ragged->dim;
      *ragged = internal::cut_at(*ragged, local.sizes());
    }
    bool ready = true;
    for (int64_t j = i + 1; j < mesh.ndim(); ++j) ready = ready && mesh.local_rank(j) == 0;
    if (mesh.size(i) == 1 && !is_sharded(placement)) continue;
    if (ready && mesh.size(i) > 1) {
      local = scatter(local, mesh, i, placement, label);
    } else if (is_sharded(placement)) { // alone, or its values come with a later mesh dim
      local = internal::redistribute::part_of(local, placement, mesh.size(i), mesh.local_rank(i));
    }
  }
  return local;
}

} // namespace

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements) {
  TORCH_CHECK(tensor.defined(), "distribute_tensor: the tensor is undefined");
  TORCH_CHECK(!is_dtensor(tensor), "distribute_tensor: the tensor is a DTensor already; use redistribute");
  TORCH_CHECK(tensor.is_leaf(),
              "distribute_tensor: the tensor is the result of operators that autograd has recorded, and a gradient would not "
              "reach them. Pass tensor.detach(), or use from_local, which is differentiable");
  TORCH_CHECK(tensor.layout() == at::kStrided, "distribute_tensor: the tensor's layout is ", tensor.layout(),
              "; only strided tensors can be sharded: pass tensor.to_dense()");
  const auto spec = Spec::intern(mesh, placements, tensor.sizes().vec(), tensor.scalar_type());
  if (tensor.is_meta() && !mesh.device().is_meta()) {
    auto part = internal::make_dtensor(at::empty(spec->local_sizes(), tensor.options().requires_grad(false)), spec);
    part.set_requires_grad(tensor.requires_grad());
    return DTensor(std::move(part));
  }
  const auto plain = tensor.detach().to(mesh.device());
  at::NoGradGuard no_grad;
  auto local = spec->on_mesh() ? scatter(plain, *spec) : at::empty({0}, plain.options());
  if (spec->has_partial()) {
    local = internal::redistribute_local(local, *spec->with(replicate_partial(spec->placements())), *spec, "distribute_tensor");
  }
  if (local.is_alias_of(tensor) || !local.is_contiguous()) local = local.clone(at::MemoryFormat::Contiguous);
  auto result = internal::make_dtensor(std::move(local), spec);
  result.set_requires_grad(tensor.requires_grad());
  return DTensor(std::move(result));
}

std::string to_string(const at::Tensor& given) {
  std::ostringstream text;
  const auto realized = is_dtensor(given) ? internal::dtensor_meta(given)->realized() : at::Tensor();
  const auto& tensor = realized.defined() ? realized : given;
  const auto* meta = internal::dtensor_meta(tensor);
  if (meta) text << "DTensor " << meta->spec->to_string() << ", local part:\n";
  const auto& values = meta ? meta->local : tensor;
  if (values.defined() && values.is_meta()) {
    text << "meta tensor of shape " << values.sizes() << " and dtype " << values.scalar_type() << ", which has no values";
  } else {
    text << values;
  }
  return text.str();
}

} // namespace tessera
