#include <tessera/dtensor/execute/leaf_gradient.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

struct PlaceGradient : torch::autograd::FunctionPreHook {
  explicit PlaceGradient(SpecPtr of_leaf) { follow(std::move(of_leaf)); }

  void follow(SpecPtr of_leaf) {
    leaf = std::move(of_leaf);
    wanted = replicate_partial(leaf->placements());
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    auto result = gradients;
    if (!result[0].defined()) return result;
    // Some derivative formulas make zeros of their own: plain, and the same on every rank.
    if (!is_dtensor(result[0])) result[0] = from_local(result[0], leaf->mesh(), Placements(leaf->mesh().ndim()));
    result[0] = DTensor(result[0]).redistribute(wanted);
    return result;
  }

  SpecPtr leaf;
  Placements wanted;
};

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

/// Whether one of them places gradients. It then does so as the leaf lies now, which `set_data` may have changed.
bool places(const Hooks& hooks, const SpecPtr& leaf) {
  for (const auto& hook : hooks) {
    auto* placing = dynamic_cast<PlaceGradient*>(hook.get());
    if (!placing) continue;
    if (placing->leaf != leaf) placing->follow(leaf);
    return true;
  }
  return false;
}

} // namespace

void place_leaf_gradient(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->requires_grad()) return;
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !tensor.is_leaf() || !meta->places_gradient()) return;
  // First of the tensor's hooks, so that a user's sees the gradient as it lies in the end. A user's first hook drops those that
  // are there: the node that accumulates has one as well, for a hook that comes between forward and backward.
  auto& hooks = torch::autograd::impl::hooks(tensor);
  if (!places(hooks, meta->spec)) hooks.insert(hooks.begin(), std::make_unique<PlaceGradient>(meta->spec));
  const auto node = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (node && !places(node->pre_hooks(), meta->spec)) node->add_pre_hook(std::make_unique<PlaceGradient>(meta->spec));
}

} // namespace tessera::internal::dispatch
