#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <tessera/dtensor/dispatch/plan.h>
#include <tessera/dtensor/dispatch/visit_tensors.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

at::Tensor on_meta(const at::Tensor& tensor) {
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

void add(const c10::IValue& value, std::vector<rules::Geometry>& out) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined()) out.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
  } else if (value.isTensorList()) {
    for (const auto& element : value.toListRef()) add(element, out);
  }
}

} // namespace

std::optional<std::vector<rules::Geometry>> infer_outputs(const c10::OperatorHandle& op, const OpInfo& info,
                                                          const torch::jit::Stack& stack, size_t begin) {
  bool new_outputs = false;
  for (const auto& result : info.returns) new_outputs |= result.written_argument < 0;
  if (!info.infers_shapes || !new_outputs) return std::nullopt;
  auto copy = arguments_from(stack, begin).vec();
  for (auto& value : copy) {
    if (value.isDevice()) value = c10::Device(at::kMeta);
  }
  replace_tensors(info, copy, [](const at::Tensor& tensor, size_t) { return std::optional(on_meta(tensor)); });
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kDTensorKey));
  try {
    op.callBoxed(copy);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt; // a composite kernel over one that has none for Meta
  }
  std::vector<rules::Geometry> result;
  bool left_out = false;
  for (const auto& value : copy) {
    const bool undefined = value.isTensor() && !value.toTensor().defined();
    if (left_out && !undefined) return std::nullopt; // it is not told which outputs these are
    left_out |= undefined;
    add(value, result);
  }
  return result;
}

} // namespace tessera::internal::dispatch
