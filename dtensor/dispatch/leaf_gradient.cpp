#include <tessera/dtensor/dispatch/leaf_gradient.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::dispatch {

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

} // namespace

void place_leaf_gradient(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!impl->requires_grad() || impl->key_set().has(c10::DispatchKey::DeferredInit)) return;
  const auto* meta = dtensor_meta(tensor);
  if (!meta || !tensor.is_leaf()) return;
  for (const auto& hook : torch::autograd::impl::hooks(tensor)) {
    if (dynamic_cast<PlaceGradient*>(hook.get())) return;
  }
  auto placements = meta->spec->placements();
  for (auto& placement : placements) {
    if (is_partial(placement)) placement = Replicate{};
  }
  torch::autograd::impl::add_hook(tensor, std::make_unique<PlaceGradient>(meta->spec->mesh(), std::move(placements)));
}

} // namespace tessera::dispatch
