#include <tessera/dtensor/dispatch/leaf_gradient.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

struct PlaceGradient : torch::autograd::FunctionPreHook {
  PlaceGradient(DeviceMesh leaf_mesh, Placements wanted) : mesh(std::move(leaf_mesh)), placements(std::move(wanted)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    auto result = gradients;
    if (!result[0].defined()) return result;
    // Some derivative formulas make zeros of their own: plain, and the same on every rank.
    if (!is_dtensor(result[0])) result[0] = from_local(result[0], mesh, Placements(mesh.ndim()));
    result[0] = DTensor(result[0]).redistribute(placements);
    return result;
  }

  DeviceMesh mesh;
  Placements placements;
};

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

bool places(const Hooks& hooks) {
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) { return dynamic_cast<PlaceGradient*>(hook.get()); });
}

std::unique_ptr<PlaceGradient> placing_hook(const Spec& spec) {
  return std::make_unique<PlaceGradient>(spec.mesh(), replicate_partial(spec.placements()));
}

} // namespace

void place_leaf_gradient(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->requires_grad() || impl->key_set().has(c10::DispatchKey::DeferredInit)) return;
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !tensor.is_leaf()) return;
  // First of the tensor's hooks, so that a user's sees the gradient as it lies in the end. A user's first hook drops those that
  // are there: the node that accumulates has one as well, for a hook that comes between forward and backward.
  auto& hooks = torch::autograd::impl::hooks(tensor);
  if (!places(hooks)) hooks.insert(hooks.begin(), placing_hook(*meta->spec));
  const auto node = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (node && !places(node->pre_hooks())) node->add_pre_hook(placing_hook(*meta->spec));
}

} // namespace tessera::internal::dispatch
