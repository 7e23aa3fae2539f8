#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>

#include <tessera/dtensor/dispatch/plan.h>
#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::dispatch {

namespace {

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto result = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

c10::IValue on_meta(const c10::IValue& value) {
  if (value.isTensor()) return on_meta(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kMeta);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) list.push_back(on_meta(element.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& element : value.toListRef()) {
      list.push_back(element.isTensor() ? std::optional(on_meta(element.toTensor())) : std::nullopt);
    }
    return list;
  }
  return value;
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
  torch::jit::Stack copy;
  copy.reserve(info.arguments.size());
  for (size_t i = 0; i < info.arguments.size(); ++i) copy.push_back(on_meta(stack[begin + i]));
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kDTensorKey));
  try {
    op.callBoxed(copy);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt; // a composite kernel over one that has none for Meta
  }
  std::vector<rules::Geometry> result;
  for (const auto& value : copy) add(value, result);
  return result;
}

} // namespace tessera::dispatch
