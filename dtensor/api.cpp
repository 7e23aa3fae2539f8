#include <tessera/dtensor/api.h>

#include <ATen/core/Formatting.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <sstream>

#include <tessera/dtensor/dispatch/leaf_gradient.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/move.h>
#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/redistribute/transition.h>

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const SpecPtr& gradient) {
    const auto& meta = meta_of(tensor, "to_local");
    save_spec(context, gradient);
    return meta.local.detach();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {make_dtensor(gradients[0].contiguous(), saved_spec(context)), at::Tensor()};
  }
};

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const SpecPtr& spec) {
    save_spec(context, spec);
    return make_dtensor(local.detach(), spec);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto spec = saved_spec(context);
    const auto moved = move(gradients[0], replicate_partial(spec->placements()), "from_local (backward)");
    return {dtensor_meta(moved)->local, at::Tensor()};
  }
};

std::vector<int64_t> even_global_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* shard = std::get_if<Shard>(&placements[i]);
    const auto* strided = std::get_if<StridedShard>(&placements[i]);
    if (shard || strided) {
      const auto given = shard ? shard->dim : strided->dim, dim = given < 0 ? given + local.dim() : given;
      TORCH_CHECK(dim >= 0 && dim < local.dim(), "from_local: ", to_string(placements), " does not fit a local tensor of ",
                  local.dim(), " dims");
      sizes[dim] *= mesh.size(static_cast<int64_t>(i));
    } else if (const auto* ragged = std::get_if<RaggedShard>(&placements[i])) {
      TORCH_CHECK(ragged->dim == 0 && local.dim() > 0, "from_local: ", to_string(placements), " needs global_sizes");
      sizes[0] = 0;
      for (const auto extent : ragged->extents) sizes[0] += extent;
    }
  }
  return sizes;
}

} // namespace

bool is_dtensor(const at::Tensor& tensor) { return dtensor_meta(tensor) != nullptr; }

DTensor::DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  TORCH_CHECK(is_dtensor(*this), "DTensor: this tensor is not a DTensor; make one with distribute_tensor or from_local");
}

const Spec& DTensor::spec() const { return *dtensor_meta(*this)->spec; }

at::Tensor DTensor::local() const { return dtensor_meta(*this)->local; }

at::Tensor DTensor::full_tensor() const { return to_local(redistribute(Placements(placements().size()))); }

at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& gradient) {
  const auto& meta = meta_of(dtensor, "to_local");
  if (!gradient && !needs_graph(dtensor)) return meta.local.detach();
  const auto spec = meta.spec->with(gradient.value_or(replicate_partial(meta.spec->placements())));
  TORCH_CHECK(spec->local_sizes() == meta.spec->local_sizes(), "to_local: a gradient of placements ",
              to_string(spec->placements()), " has not the shape of this rank's part; the tensor is ", meta.spec->to_string());
  if (!needs_graph(dtensor)) return meta.local.detach();
  auto local = ToLocal::apply(dtensor, spec);
  dispatch::place_leaf_gradient(dtensor);
  return local;
}

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                   std::optional<std::vector<int64_t>> global_sizes, const std::optional<std::vector<int64_t>>& global_strides) {
  TORCH_CHECK(local.defined(), "from_local: the tensor is undefined");
  TORCH_CHECK(!is_dtensor(local), "from_local: the tensor is a DTensor already");
  TORCH_CHECK(local.layout() == at::kStrided, "from_local: the tensor's layout is ", local.layout(), "; pass a strided one");
  TORCH_CHECK(local.device().type() == mesh.device_type(), "from_local: the tensor is on ", local.device(), ", but the mesh is ",
              mesh.to_string());
  TORCH_CHECK(static_cast<int64_t>(placements.size()) == mesh.ndim(), "from_local: one placement a mesh dim is needed, not ",
              to_string(placements), " on ", mesh.to_string());
  auto sizes = global_sizes ? std::move(*global_sizes) : even_global_sizes(local, mesh, placements);
  const auto spec =
      Spec::intern(mesh, placements, std::move(sizes), local.scalar_type(), global_strides.value_or(std::vector<int64_t>{}));
  return DTensor(needs_graph(local) ? FromLocal::apply(local, spec) : make_dtensor(local.detach(), spec));
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
  auto output = at::empty(redistribute::part_sizes(whole.sizes().vec(), placement, ranks, rank), whole.options());
  auto input = at::empty({0}, whole.options());
  std::vector<int64_t> input_splits(ranks, 0), output_splits(ranks, 0);
  output_splits[0] = output.numel();
  if (rank == 0) {
    std::vector<at::Tensor> parts;
    for (int64_t r = 0; r < ranks; ++r) {
      parts.push_back(redistribute::part_of(whole, placement, ranks, r).reshape(-1));
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
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) merged = ragged->dim;
    bool ready = true;
    for (int64_t j = i + 1; j < mesh.ndim(); ++j) ready = ready && mesh.local_rank(j) == 0;
    if (mesh.size(i) == 1 && !is_sharded(placement)) continue;
    if (ready && mesh.size(i) > 1) {
      local = scatter(local, mesh, i, placement, label);
    } else if (is_sharded(placement)) { // alone, or its values come with a later mesh dim
      local = redistribute::part_of(local, placement, mesh.size(i), mesh.local_rank(i));
    }
  }
  return local;
}

} // namespace

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const Placements& placements) {
  TORCH_CHECK(tensor.defined(), "distribute_tensor: the tensor is undefined");
  TORCH_CHECK(!is_dtensor(tensor), "distribute_tensor: the tensor is a DTensor already; use redistribute");
  TORCH_CHECK(tensor.layout() == at::kStrided, "distribute_tensor: the tensor's layout is ", tensor.layout(),
              "; only strided tensors can be sharded: pass tensor.to_dense()");
  const auto plain = tensor.detach().to(mesh.device());
  const auto spec = Spec::intern(mesh, placements, plain.sizes().vec(), plain.scalar_type());
  at::NoGradGuard no_grad;
  auto local = spec->on_mesh() ? scatter(plain, *spec) : at::empty({0}, plain.options());
  if (spec->has_partial()) {
    local = redistribute_local(local, *spec->with(replicate_partial(spec->placements())), *spec, "distribute_tensor");
  }
  if (local.is_alias_of(tensor) || !local.is_contiguous()) local = local.clone(at::MemoryFormat::Contiguous);
  auto result = make_dtensor(std::move(local), spec);
  result.set_requires_grad(tensor.requires_grad());
  return DTensor(std::move(result));
}

std::string to_string(const at::Tensor& tensor) {
  std::ostringstream text;
  const auto* meta = dtensor_meta(tensor);
  if (!meta) {
    text << tensor;
  } else {
    text << "DTensor " << meta->spec->to_string() << ", local part:\n" << meta->local;
  }
  return text.str();
}

} // namespace tessera
