#pragma once

#include <torch/nn/module.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/fsdp/fully_shard.h>

namespace tessera {

/// Marks the forward of a sharded module: its end frees the unsharded parameters of `module`'s group and of those below it, as
/// FSDP2's post-forward hook does, without waiting for the next group's first read. Groups with reshard_after_forward = false
/// stay.
class ForwardScope {
 public:
  explicit ForwardScope(const torch::nn::Module& module) : handle_(fsdp(module)) {}
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  FSDPModule handle_;
};

/// `const auto scope = tessera::forward_scope(*module);`
inline ForwardScope forward_scope(const torch::nn::Module& module) { return ForwardScope(module); }

namespace fsdp_internal {

/// `tensor` in the dtype that the module's policy gives forward inputs; the same tensor when there is nothing to cast.
at::Tensor cast_input(const FSDPModule& handle, const at::Tensor& tensor);
/// The same for `output_dtype`.
at::Tensor cast_output(const FSDPModule& handle, const at::Tensor& tensor);

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

template <typename Value>
constexpr bool holds_tensors();

template <typename Tuple, size_t... I>
constexpr bool any_element_holds_tensors(std::index_sequence<I...>) {
  return (holds_tensors<std::tuple_element_t<I, Tuple>>() || ...);
}

/// Whether a `Value` can have a tensor in it. Other arguments are passed on as they are, references included.
template <typename Value>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    return true;
  } else if constexpr (HasElements<Value>) {
    return any_element_holds_tensors<Value>(std::make_index_sequence<std::tuple_size_v<Value>>());
  } else if constexpr (IsMap<Value>) {
    return holds_tensors<typename Value::mapped_type>();
  } else if constexpr (IsOptional<Value> || IsSequence<Value>) {
    return holds_tensors<typename Value::value_type>();
  } else {
    return false;
  }
}

/// Replaces the tensors inside `value`.
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

} // namespace fsdp_internal

/// Runs `module->forward(inputs...)` as FSDP2 runs a wrapped module: floating-point tensors among the inputs (in vectors,
/// tuples, optionals and maps too) are cast to `param_dtype` when `cast_forward_inputs` is set, and those among the outputs to
/// `output_dtype`; the end of the forward frees the group (see ForwardScope). `module` is a ModuleHolder or a pointer to a
/// sharded module.
template <typename ModulePointer, typename... Inputs>
auto call(ModulePointer& module, Inputs&&... inputs) {
  TORCH_CHECK_VALUE(module, "tessera::call: the module is null");
  const FSDPModule handle = fsdp(static_cast<const torch::nn::Module&>(*module));
  const ForwardScope scope(*module);
  const auto in = [&](const at::Tensor& tensor) { return fsdp_internal::cast_input(handle, tensor); };
  const auto out = [&](const at::Tensor& tensor) { return fsdp_internal::cast_output(handle, tensor); };
  return fsdp_internal::cast_tensors(out, module->forward(fsdp_internal::cast_tensors(in, std::forward<Inputs>(inputs))...));
}

} // namespace tessera
