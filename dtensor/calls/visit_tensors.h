#pragma once

// Internal: the tensors among the arguments of a call.

#include <ATen/core/stack.h>

#include <optional>
#include <span>

#include <tessera/dtensor/calls/call_schema.h>

namespace tessera::internal::dispatch {

/// Whether `asks(tensor, argument)` is true of a defined tensor among `arguments`, lists spread; `argument` is its position, or
/// that of its list. Stops at the first.
template <typename Asks>
bool any_tensor(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments, const Asks& asks) {
  for (const size_t i : schema.tensors) {
    const auto& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined() && asks(value.toTensor(), i)) return true;
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined() && asks(element.toTensor(), i)) return true;
      }
    }
  }
  return false;
}

/// `visit(tensor, argument)` for each of them.
template <typename Visit>
void visit_tensors(const CallSchema& schema, c10::ArrayRef<c10::IValue> arguments, const Visit& visit) {
  any_tensor(schema, arguments, [&](const at::Tensor& tensor, size_t argument) {
    visit(tensor, argument);
    return false;
  });
}

/// Puts `replacement(tensor, argument)`, an optional tensor, in the place of each. A list is copied where an element changes.
template <typename Replacement>
void replace_tensors(const CallSchema& schema, std::span<c10::IValue> arguments, const Replacement& replacement) {
  const auto replace_in_list = [&](c10::IValue& list, size_t argument) {
    std::optional<c10::List<c10::IValue>> copy;
    const auto elements = list.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (!elements[i].isTensor() || !elements[i].toTensor().defined()) continue;
      auto tensor = replacement(elements[i].toTensor(), argument);
      if (!tensor) continue;
      if (!copy) copy = list.toList().copy();
      copy->set(i, std::move(*tensor));
    }
    if (copy) list = *copy;
  };
  for (const size_t i : schema.tensors) {
    auto& value = arguments[i];
    if (value.isTensor() && value.toTensor().defined()) {
      if (auto tensor = replacement(value.toTensor(), i)) value = std::move(*tensor);
    } else if (value.isList()) {
      replace_in_list(value, i);
    }
  }
}

/// The arguments of the call at the end of `stack`, as long as that is not resized.
inline c10::ArrayRef<c10::IValue> arguments_of(const CallSchema& schema, const torch::jit::Stack& stack) {
  const auto count = schema.arguments.size();
  return c10::ArrayRef<c10::IValue>(stack.data() + stack.size() - count, count);
}

/// Whether DTensors that a call reads together lie on two devices, as offloaded parameters and others do. A write may cross
/// devices, and lists that give a list are taken item by item.
class DevicesOfDTensors {
 public:
  explicit DevicesOfDTensors(const CallSchema& schema) : together_(!schema.writes && !schema.returns_list) {}
  /// A DTensor among the arguments. A number may be on any device.
  void add(const at::Tensor& tensor) {
    if (!together_ || tensor.dim() == 0) return;
    are_two_ |= first_ && *first_ != tensor.device();
    if (!first_) first_ = tensor.device();
  }
  bool are_two() const { return are_two_; }

 private:
  bool together_;
  std::optional<c10::Device> first_;
  bool are_two_ = false;
};

} // namespace tessera::internal::dispatch
