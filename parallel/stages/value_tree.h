#pragma once

// Internal: the tensors and numbers in what goes from layer to layer, and the shape of it as a text.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::internal::pipeline {

/// A value taken apart. The text has the structure, strings and keys; tensors and numbers come in its order.
struct FlatValue {
  std::string structure;
  std::vector<at::Tensor> tensors; ///< undefined ones too
  std::vector<int64_t> numbers;    ///< ints and bools; doubles by their bits
};

/// Throws for what is neither a tensor, an int, a double, a bool, a string, None, nor a list, tuple or dict of these with strings
/// as keys; `what` names it.
FlatValue flatten(const c10::IValue& value, const std::string& what);
c10::IValue unflatten(const FlatValue& flat);

/// The tensors alone.
std::vector<at::Tensor> tensors_of(const c10::IValue& value);
/// A copy of `value` with other tensors.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& other);

} // namespace tessera::internal::pipeline
