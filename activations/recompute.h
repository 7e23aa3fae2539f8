#pragma once

#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <tessera/activations/recomputation.h>
#include <tessera/activations/recompute_options.h>
#include <tessera/activations/tensors_inside.h>

namespace tessera {

namespace internal {

template <typename Function, typename... Inputs>
concept PointsToForward = requires(Function& function, Inputs&&... inputs) {
  function->forward(std::forward<Inputs>(inputs)...);
};

/// The `forward` of a module, a holder or a pointer to a module; or the call of anything else.
template <typename Function, typename... Inputs>
auto run_function(Function& function, Inputs&&... inputs) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Function>) {
    return function.forward(std::forward<Inputs>(inputs)...);
  } else if constexpr (PointsToForward<Function, Inputs...>) {
    return function->forward(std::forward<Inputs>(inputs)...);
  } else {
    return std::invoke(function, std::forward<Inputs>(inputs)...);
  }
}

/// The module that `run_function` runs the forward of, and null for other functions.
template <typename Function>
const torch::nn::Module* module_of_function(const Function& function) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Function>) {
    return &function;
  } else if constexpr (requires { static_cast<const torch::nn::Module*>(&*function); }) {
    return &*function;
  } else {
    return nullptr;
  }
}

/// Copies of a function and its inputs, to call it with once more. A module is kept alive where somebody owns it.
template <typename Function, typename... Inputs>
class RepeatableCall {
 public:
  template <typename Given>
  RepeatableCall(Given&& function, std::tuple<std::decay_t<Inputs>...> inputs)
      : function_(keep(function)), inputs_(std::move(inputs)) {}

  Function& function() {
    if constexpr (kIsModule) {
      return *function_.first;
    } else {
      return function_;
    }
  }
  /// Takes the tensors out of the inputs.
  std::vector<at::Tensor> take_tensors() {
    auto tensors = tensors_inside(inputs_);
    set_tensors(std::vector<at::Tensor>(tensors.size()));
    return tensors;
  }
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& tensors) {
    set_tensors(tensors);
    auto inputs = inputs_;
    set_tensors(std::vector<at::Tensor>(tensors.size()));
    auto outputs = std::apply([&](auto&... each) { return run_function(function(), std::forward<Inputs>(each)...); }, inputs);
    return tensors_inside(outputs);
  }

 private:
  static constexpr bool kIsModule = std::is_base_of_v<torch::nn::Module, Function>;
  using Kept = std::conditional_t<kIsModule, std::pair<Function*, std::shared_ptr<const torch::nn::Module>>, Function>;

  template <typename Given>
  static Kept keep(Given& function) {
    if constexpr (kIsModule) {
      return {&function, static_cast<const torch::nn::Module&>(function).weak_from_this().lock()};
    } else if constexpr (std::is_const_v<Given> || std::is_copy_constructible_v<Function>) {
      return function;
    } else {
      return std::move(function);
    }
  }
  void set_tensors(const std::vector<at::Tensor>& tensors) {
    size_t next = 0;
    cast_inside([&](const at::Tensor&) { return tensors[next++]; }, inputs_);
  }

  Kept function_;
  std::tuple<std::decay_t<Inputs>...> inputs_; ///< without their tensors
};

template <typename Value>
inline constexpr bool kIsReferenceToTensors = false;
template <typename Value>
inline constexpr bool kIsReferenceToTensors<c10::ArrayRef<Value>> = true;

} // namespace internal

/// Calls `function(inputs...)` and keeps only its inputs for backward. The backward calls the function again for the other
/// tensors that autograd saves in it: activation checkpointing (PyTorch: torch.utils.checkpoint with use_reentrant=False). The
/// gradients equal those of a plain call. Without grad mode this *is* a plain call.
///
/// `function` is a module, a holder or a pointer to a module, whose `forward` is called; or anything that can be called, such as
/// a lambda. Variables that it captures by reference must live until backward. Inputs and outputs are tensors, vectors, tuples,
/// optionals and maps of them, and anything else that can be copied. Calls nest: an outer call keeps the inputs of an inner one.
///
/// The second run gets the random numbers, the autocast state and the buffers of a module as in the first run, and does not
/// change buffers such as running statistics. It must do the same as the first run. If autograd saves another number of tensors,
/// or other shapes, dtypes or devices, backward throws an error that names the function. An input that was changed in place
/// during or after the call is an error too. torch::autograd::grad, backward with `inputs`, retain_graph and create_graph work as
/// for a plain call; each backward runs the function again.
///
/// With `fully_shard`: around a sharded module or inside one. The second run does not gather a group that is gathered, and frees
/// no group that it reads, because their gradients come next. All ranks call it alike.
template <typename Function, typename... Inputs>
auto recompute(RecomputeOptions options, Function&& function, Inputs&&... inputs) {
  using Plain = std::remove_cvref_t<Function>;
  static_assert((!internal::kIsReferenceToTensors<std::remove_cvref_t<Inputs>> && ...),
                "recompute: an ArrayRef does not own its elements; pass a std::vector");
  static_assert(std::is_base_of_v<torch::nn::Module, Plain> || std::is_copy_constructible_v<Plain> ||
                    std::is_rvalue_reference_v<Function&&>,
                "recompute: the function is kept for the second run, and cannot be copied; move it, or pass a pointer to it");
  using Call = internal::RepeatableCall<Plain, Inputs...>;
  const auto call = std::make_shared<Call>(function, std::tuple<std::decay_t<Inputs>...>(inputs...));
  if (!at::GradMode::is_enabled()) return internal::run_function(call->function(), std::forward<Inputs>(inputs)...);
  const auto* module = internal::module_of_function(call->function());
  if (options.name.empty() && !module) options.name = c10::demangle(typeid(Plain).name());
  const auto recomputation =
      std::make_shared<internal::Recomputation>(std::move(options), call->take_tensors(), module,
                                                [call](const std::vector<at::Tensor>& tensors) { return (*call)(tensors); });
  internal::Recomputation::FirstRun run(*recomputation);
  auto outputs = internal::run_function(call->function(), std::forward<Inputs>(inputs)...);
  run.finish(internal::tensors_inside(outputs));
  return outputs;
}

/// Recomputes with the default options.
template <typename Function, typename... Inputs>
requires(!std::is_same_v<std::remove_cvref_t<Function>, RecomputeOptions>) auto recompute(Function&& function,
                                                                                          Inputs&&... inputs) {
  return recompute(RecomputeOptions{}, std::forward<Function>(function), std::forward<Inputs>(inputs)...);
}

} // namespace tessera
