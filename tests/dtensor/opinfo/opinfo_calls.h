#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::testing {

/// One operator call of a sample: what export_opinfo.py wrote.
struct OpCall {
  c10::OperatorHandle op;
  torch::jit::Stack arguments; ///< by schema; tensors that require grad say so
};

/// The calls behind the samples of one OpInfo, in the order of the file. Operators that this LibTorch lacks are left
/// out, and calls without tensors.
std::vector<OpCall> load_calls(const std::filesystem::path& file);

/// `stack` with every tensor replaced by `replace(tensor)`; lists as well.
template <typename Replace>
torch::jit::Stack with_tensors(const torch::jit::Stack& stack, const Replace& replace) {
  const auto replaced = [&](const c10::IValue& value, const auto& self) -> c10::IValue {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
    if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
    c10::impl::GenericList list(value.type()->containedType(0));
    for (const auto& element : value.toListRef()) list.push_back(self(element, self));
    return list;
  };
  torch::jit::Stack result;
  for (const auto& value : stack) result.push_back(replaced(value, replaced));
  return result;
}

/// All tensors among `values`, lists spread.
std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values);

} // namespace tessera::testing
