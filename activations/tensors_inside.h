#pragma once

// Internal: the tensors inside a value of any type: a tensor, or vectors, tuples, optionals and maps of them.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::internal {

template <typename Value>
concept HasElements = requires {
  typename std::tuple_size<Value>::type;
}; // tuple, pair, array
template <typename Value>
concept IsOptional = requires(Value value) {
  value.has_value(), *value;
};
template <typename Value>
concept IsMap = requires {
  typename Value::mapped_type;
  requires !std::is_same_v<typename Value::mapped_type, Value>;
};
template <typename Value>
concept IsSequence = requires(Value value) {
  value.begin(), value.end(), value.push_back(*value.begin());
  requires !std::is_same_v<typename Value::value_type, Value>; // as JSON's is
};

/// Whether a `Value` can have a tensor in it. Other arguments are passed on as they are, references included.
template <typename Value>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    return true;
  } else if constexpr (HasElements<Value>) {
    return []<size_t... I>(std::index_sequence<I...>) { return (holds_tensors<std::tuple_element_t<I, Value>>() || ...); }
    (std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (IsMap<Value>) {
    return holds_tensors<typename Value::mapped_type>();
  } else if constexpr (IsOptional<Value> || IsSequence<Value>) {
    return holds_tensors<typename Value::value_type>();
  } else {
    return false;
  }
}

/// Replaces the tensors inside `value` by what `cast` makes of them.
template <typename Cast, typename Value>
void cast_inside(const Cast& cast, Value& value) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    value = cast(value);
  } else if constexpr (HasElements<Value>) {
    std::apply([&](auto&... elements) { (cast_inside(cast, elements), ...); }, value);
  } else if constexpr (IsOptional<Value>) {
    if (value.has_value()) cast_inside(cast, *value);
  } else if constexpr (IsMap<Value>) {
    for (auto& [key, element] : value) cast_inside(cast, element);
  } else if constexpr (holds_tensors<Value>()) { // a sequence
    for (auto& element : value) cast_inside(cast, element);
  }
}

/// A copy of `value` with its tensors replaced; anything that holds none as it is.
template <typename Cast, typename Value>
decltype(auto) cast_tensors(const Cast& cast, Value&& value) {
  using Plain = std::decay_t<Value>;
  if constexpr (holds_tensors<Plain>()) {
    Plain result(std::forward<Value>(value));
    cast_inside(cast, result);
    return result;
  } else {
    return std::forward<Value>(value);
  }
}

/// The tensors inside `value`, in the order in which `cast_inside` meets them; undefined ones too.
template <typename Value>
std::vector<at::Tensor> tensors_inside(Value& value) {
  std::vector<at::Tensor> tensors;
  const auto note = [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  };
  cast_inside(note, value);
  return tensors;
}

} // namespace tessera::internal
