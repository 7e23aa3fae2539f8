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

template <typename Cast, typename Value>
decltype(auto) cast_tensors(const Cast& cast, Value&& value) {
  using Plain = std::decay_t<Value>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    return cast(value);
  } else if constexpr (std::is_same_v<Plain, std::vector<at::Tensor>>) {
    std::vector<at::Tensor> result;
    for (const auto& tensor : value) result.push_back(cast(tensor));
    return result;
  } else {
    return std::forward<Value>(value);
  }
}

template <typename Cast, typename... Elements>
std::tuple<Elements...> cast_tensors(const Cast& cast, std::tuple<Elements...> values) {
  return std::apply([&](auto&&... value) { return std::tuple<Elements...>(cast_tensors(cast, value)...); }, values);
}

} // namespace fsdp_internal

/// Runs `module->forward(inputs...)` as FSDP2 runs a wrapped module: floating-point tensors among the inputs (in vectors and
/// tuples too) are cast to `param_dtype` when `cast_forward_inputs` is set, and those among the outputs to `output_dtype`; the
/// end of the forward frees the group (see ForwardScope). `module` is a ModuleHolder or a pointer to a sharded module.
template <typename ModulePointer, typename... Inputs>
auto call(ModulePointer& module, Inputs&&... inputs) {
  const FSDPModule handle = fsdp(static_cast<const torch::nn::Module&>(*module));
  const ForwardScope scope(*module);
  const auto in = [&](const at::Tensor& tensor) { return fsdp_internal::cast_input(handle, tensor); };
  const auto out = [&](const at::Tensor& tensor) { return fsdp_internal::cast_output(handle, tensor); };
  return fsdp_internal::cast_tensors(out, module->forward(fsdp_internal::cast_tensors(in, std::forward<Inputs>(inputs))...));
}

} // namespace tessera
