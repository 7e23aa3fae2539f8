// to_local and from_local: between DTensors and the parts that the ranks hold.

#include <c10/util/safe_numerics.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/execute/leaf_gradient.h>
#include <tessera/dtensor/redistribute/move.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// How the gradient of a gradient lies: parts of a sum add up to it, as those of the tensor add up to its value; for any other
/// reduction every rank has it.
SpecPtr linear(const SpecPtr& spec) {
  auto placements = spec->placements();
  for (auto& placement : placements) {
    const auto* partial = std::get_if<Partial>(&placement);
    if (partial) placement = Partial{reduce_together(*partial, Partial{}) ? Partial::Op::kSum : Partial::Op::kAvg};
  }
  return spec->with(placements);
}

// ToLocal and FromLocal are each other's derivatives, to every order. `gradient`: how the gradient of what they give or take
// lies.

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const SpecPtr& gradient) {
    const auto& meta = meta_of(tensor, "to_local");
    save_spec(context, meta.spec);
    save_spec(context, gradient, "gradient");
    return meta.local.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const SpecPtr& spec, const SpecPtr& gradient) {
    save_spec(context, spec);
    save_spec(context, gradient, "gradient");
    return make_dtensor(local.detach(), spec);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto spec = saved_spec(context), gradient = saved_spec(context, "gradient");
    constexpr auto* kLabel = "from_local (backward)";
    const auto given = gradient_as_dtensor(gradients[0], *spec, kLabel);
    const auto moved = differentiable_move(given, spec->mesh(), gradient->placements(), kLabel);
    return {needs_graph(moved) ? ToLocal::apply(moved, linear(spec)) : dtensor_meta(moved)->local, {}, {}};
  }
};

variable_list ToLocal::backward(AutogradContext* context, const variable_list& gradients) {
  const auto spec = saved_spec(context), gradient = saved_spec(context, "gradient");
  // Beside DTensors of another mesh what to_local gave counts as the same on its ranks, and so does the gradient.
  const auto& given = gradients[0];
  const auto local = (is_dtensor(given) ? DTensor(given).full_tensor() : given).contiguous();
  return {needs_graph(local) ? FromLocal::apply(local, gradient, linear(spec)) : make_dtensor(local, gradient), {}};
}

std::vector<int64_t> even_global_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (auto i = placements.size(); i-- > 0;) { // a RaggedShard splits what those before it have left
    const auto* shard = std::get_if<Shard>(&placements[i]);
    const auto* strided = std::get_if<StridedShard>(&placements[i]);
    if (shard || strided) {
      const auto given = shard ? shard->dim : strided->dim, dim = given < 0 ? given + local.dim() : given;
      TORCH_CHECK(dim >= 0 && dim < local.dim(), "from_local: ", to_string(placements), " does not fit a local tensor of ",
                  local.dim(), " dims");
      const auto ranks = mesh.size(static_cast<int64_t>(i));
      TORCH_CHECK(!c10::mul_overflows(sizes[dim], ranks, &sizes[dim]), "from_local: dim ", dim, " of a local tensor of shape ",
                  local.sizes(), ", on ", ranks, " ranks, has more elements than 64 bits count");
    } else if (const auto* ragged = std::get_if<RaggedShard>(&placements[i])) {
      TORCH_CHECK(ragged->dim == 0 && local.dim() > 0, "from_local: ", to_string(placements), " needs global_sizes");
      sizes[0] = 0;
      for (const auto extent : ragged->extents) {
        TORCH_CHECK(!c10::add_overflows(sizes[0], extent, &sizes[0]), "from_local: the extents of ", to_string(placements),
                    " add up to more than 64 bits count");
      }
    }
  }
  return sizes;
}

} // namespace

} // namespace tessera::internal

namespace tessera {

at::Tensor to_local(const at::Tensor& dtensor, const std::optional<Placements>& gradient) {
  const auto& meta = internal::meta_of(dtensor, "to_local");
  if (!gradient && !internal::needs_graph(dtensor)) return meta.local.detach();
  // Row-major, as the gradient's part is made.
  const auto spec = Spec::intern(meta.spec->mesh(), gradient.value_or(replicate_partial(meta.spec->placements())),
                                 meta.spec->sizes(), meta.spec->dtype());
  TORCH_CHECK(spec->local_sizes() == meta.spec->local_sizes(), "to_local: a gradient of placements ",
              to_string(spec->placements()), " has not the shape of this rank's part; the tensor is ", meta.spec->to_string());
  if (!internal::needs_graph(dtensor)) return meta.local.detach();
  auto local = internal::ToLocal::apply(internal::in_graph(dtensor), spec);
  internal::dispatch::place_leaf_gradient(dtensor);
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
  auto sizes = global_sizes ? std::move(*global_sizes) : internal::even_global_sizes(local, mesh, placements);
  auto strides = global_strides ? *global_strides : internal::strides_like(local, sizes);
  const auto spec = Spec::intern(mesh, placements, std::move(sizes), local.scalar_type(), std::move(strides));
  if (!internal::needs_graph(local)) return DTensor(internal::make_dtensor(local.detach(), spec));
  return DTensor(internal::FromLocal::apply(local, spec, spec->with(replicate_partial(placements))));
}

} // namespace tessera
