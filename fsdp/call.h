#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <tessera/activations/tensors_inside.h>
#include <tessera/fsdp/fully_shard.h>

namespace tessera {

/// Marks the forward of a sharded module: its end frees the unsharded parameters of `module`'s group and of those below it, as
/// FSDP2's post-forward hook does, without waiting for the next group's first read. A group of several modules is freed when each
/// of them has had its forward. Groups with reshard_after_forward = false stay. It does nothing for a module without sharded
/// parameters, so that the same program runs in one process. An error for a module that was not sharded itself, but has some.
class ForwardScope {
 public:
  explicit ForwardScope(const torch::nn::Module& module);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  std::shared_ptr<internal::ShardedModule> state_; ///< null where nothing is sharded
  const torch::nn::Module* module_;
};

/// `const auto scope = tessera::forward_scope(*module);`
inline ForwardScope forward_scope(const torch::nn::Module& module) { return ForwardScope(module); }

namespace internal {

/// A `tessera::call` of a module while it runs.
class CallScope {
 public:
  explicit CallScope(const torch::nn::Module& module);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  /// `tensor` in the dtype that the module's policy gives forward inputs; the same tensor when there is nothing to cast.
  at::Tensor cast_input(const at::Tensor& tensor) const;
  /// The same for `output_dtype`; what was computed from parameters alone, without grad mode, is made whole.
  at::Tensor cast_output(const at::Tensor& tensor) const;

 private:
  std::shared_ptr<ShardedModule> state_; ///< null where nothing is sharded
  ForwardScope forward_;
  std::optional<at::ScalarType> input_dtype_;
};

template <typename... Inputs>
concept BeginWithFunction = (sizeof...(Inputs) > 0) &&
                            std::is_member_function_pointer_v<std::decay_t<std::tuple_element_t<0, std::tuple<Inputs..., int>>>>;

/// Runs `run` on the inputs, cast as a `tessera::call` of `module` casts them. Returns the result of `run`; if it has tensors
/// inside, a copy with these tensors cast.
template <typename Run, typename... Inputs>
decltype(auto) run_call(const torch::nn::Module& module, const Run& run, Inputs&&... inputs) {
  const CallScope scope(module);
  const auto in = [&](const at::Tensor& tensor) { return scope.cast_input(tensor); };
  using Result = decltype(run(cast_tensors(in, std::forward<Inputs>(inputs))...));
  if constexpr (holds_tensors<std::decay_t<Result>>()) {
    const auto out = [&](const at::Tensor& tensor) { return scope.cast_output(tensor); };
    return cast_tensors(out, std::decay_t<Result>(run(cast_tensors(in, std::forward<Inputs>(inputs))...)));
  } else {
    return run(cast_tensors(in, std::forward<Inputs>(inputs))...);
  }
}

} // namespace internal

/// Runs `module->forward(inputs...)` as FSDP2 runs a wrapped module: floating-point tensors among the inputs (in vectors,
/// tuples, optionals and maps too) are cast to `param_dtype` when `cast_forward_inputs` is set, and those among the outputs to
/// `output_dtype`; the end of the forward frees the group (see ForwardScope). `module` is a ModuleHolder or a pointer to a
/// module. Without sharded parameters it is a plain call. docs/mixed_precision.md has the dtype of each tensor.
template <typename ModulePointer, typename... Inputs>
requires(!internal::BeginWithFunction<Inputs...>) //
    decltype(auto) call(ModulePointer&& module, Inputs&&... inputs) {
  TORCH_CHECK_VALUE(module, "tessera::call: the module is null");
  const auto run = [&](auto&&... cast) -> decltype(auto) { return module->forward(std::forward<decltype(cast)>(cast)...); };
  return internal::run_call(*module, run, std::forward<Inputs>(inputs)...);
}

/// Calls any member function in the same way: `tessera::call(model, &ModelImpl::encode, x)`. Of an overloaded one, a cast says
/// which: `static_cast<Tensor (ModelImpl::*)(const Tensor&) const>(&ModelImpl::encode)`. (FSDP2: `register_fsdp_forward_method`.)
template <typename ModulePointer, typename Function, typename... Inputs>
requires internal::BeginWithFunction<Function> //
decltype(auto) call(ModulePointer&& module, Function function, Inputs&&... inputs) {
  TORCH_CHECK_VALUE(module, "tessera::call: the module is null");
  TORCH_CHECK_VALUE(function, "tessera::call: the member function of ", module->name(), " is null");
  const auto run = [&](auto&&... cast) -> decltype(auto) {
    return std::invoke(function, *module, std::forward<decltype(cast)>(cast)...);
  };
  return internal::run_call(*module, run, std::forward<Inputs>(inputs)...);
}

} // namespace tessera
