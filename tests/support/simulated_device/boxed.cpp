#include <tessera/tests/support/simulated_device/boxed.h>

#include <tessera/tests/support/simulated_device/generator.h>

#include <ATen/core/List.h>

#include <optional>

namespace tessera::testing::sim {

IValue map_tensors(const IValue& value, const TensorMap& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional(map(*tensor)) : tensor);
    return list;
  }
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  const auto visit_one = [&](const IValue& each) {
    if (each.isTensor() && each.toTensor().defined()) visit(each.toTensor());
  };
  if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& each : value.toListRef()) visit_one(each);
  } else {
    visit_one(value);
  }
}

Stack map_arguments(const Stack& arguments, c10::DeviceType type, const TensorMap& map) {
  Stack mapped;
  for (const auto& value : arguments) {
    if (value.isDevice())
      mapped.emplace_back(c10::Device(type));
    else if (value.isGenerator() && value.toGenerator().device().type() == kDeviceType)
      mapped.emplace_back(cpu_generator_of(value.toGenerator()));
    else
      mapped.push_back(map_tensors(value, map));
  }
  return mapped;
}

Stack call(const c10::OperatorHandle& op, Stack arguments) {
  // The boxed wrapper of a kernel that returns several `Tensor&` drops the arguments before it reads these: another owner is
  // needed.
  const Stack kept = arguments;
  op.callBoxed(arguments);
  return arguments;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  const auto key = type_ == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto alias = at::detail::make_tensor<c10::TensorImpl>(storage_of(tensor.storage()), c10::DispatchKeySet(key), tensor.dtype());
  auto* const impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

c10::Storage Aliases::storage_of(const c10::Storage& storage) {
  for (const auto& [known, alias] : made_)
    if (known == storage.unsafeGetStorageImpl()) return alias;
  const bool is_meta = type_ == c10::kMeta;
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(is_meta ? nullptr : const_cast<void*>(storage.data()), c10::Device(type_)),
                     is_meta ? c10::GetAllocator(c10::kMeta) : nullptr, /*resizable=*/is_meta);
  made_.emplace_back(storage.unsafeGetStorageImpl(), alias);
  return alias;
}

} // namespace tessera::testing::sim
