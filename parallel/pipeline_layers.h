#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// What goes from layer to layer, and a micro-batch: tensors, ints, doubles, bools, strings, None, and lists, tuples and dicts of
/// these. A function takes and returns `at::Tensor`, `std::tuple`, `std::vector` and so on, which convert to one and back.
using PipelineValue = c10::IValue;

namespace internal::pipeline {

template <typename Function>
struct ArgumentsOf : ArgumentsOf<decltype(&Function::operator())> {};
template <typename Result, typename... Arguments>
struct ArgumentsOf<Result (*)(Arguments...)> {
  using Types = std::tuple<std::remove_cvref_t<Arguments>...>;
};
template <typename Result, typename Class, typename... Arguments>
struct ArgumentsOf<Result (Class::*)(Arguments...) const> : ArgumentsOf<Result (*)(Arguments...)> {};
template <typename Result, typename Class, typename... Arguments>
struct ArgumentsOf<Result (Class::*)(Arguments...)> : ArgumentsOf<Result (*)(Arguments...)> {};
template <typename Function>
using Arguments = typename ArgumentsOf<std::decay_t<Function>>::Types;

template <typename Value>
Value from_value(const PipelineValue& value) {
  if constexpr (std::is_same_v<Value, PipelineValue>) {
    return value;
  } else {
    return value.to<Value>();
  }
}

} // namespace internal::pipeline

/// A model as a list of layers, one after another, which `split` cuts into stages. Each layer names what it has of the model, and
/// how it computes. Every rank makes the same list, of the whole model, mostly on the meta device (`on_meta`).
///
///   PipelineLayers layers(*model);
///   layers.add("embed", {"tokens", "places"}, [model](at::Tensor tokens) { … return x; });
///   layers.add_list("blocks", [](BlockImpl& block, at::Tensor x) { return block.forward(x); });
///   layers.add("head", {"norm"}, [model](at::Tensor x, Batch batch) { … return logits; });
///
/// A residual that a later layer adds is a part of what goes from layer to layer. What all layers may read, such as a mask, is in
/// the micro-batch.
class PipelineLayers {
 public:
  /// Computes a layer, of its input and the micro-batch.
  using Function = std::function<PipelineValue(const PipelineValue& input, const PipelineValue& micro_batch)>;
  struct Layer {
    std::string name;
    std::vector<std::string> members; ///< full names of modules, parameters or buffers below the model; maybe none
    Function function;
  };

  /// The model must outlive the list, and what is made of it.
  explicit PipelineLayers(torch::nn::Module& model) : model_(&model) {}

  /// Adds a layer that has the parameters and buffers of `members`, and of no other. `function` is called with the output of the
  /// layer before, the first one with the micro-batch, as its first argument's type; and with the micro-batch, where it takes a
  /// second one. Throws for a name that is taken, and for a member that the model lacks, with the nearest one.
  template <typename Callable>
  PipelineLayers& add(std::string name, std::vector<std::string> members, Callable function) {
    return add_layer({std::move(name), std::move(members), wrapped(std::move(function))});
  }

  /// Adds the modules of the torch::nn::ModuleList `name`, each a layer "<name>.<i>". `function` gets the module by reference to
  /// its class, and then what that of `add` gets. Throws where a module is of another class.
  template <typename Callable>
  PipelineLayers& add_list(const std::string& name, const Callable& function) {
    using Types = internal::pipeline::Arguments<Callable>;
    using Contained = std::tuple_element_t<0, Types>;
    const auto modules = modules_of_list(name);
    for (size_t i = 0; i < modules.size(); ++i) {
      auto path = name + "." + std::to_string(i);
      auto* const module = dynamic_cast<Contained*>(modules[i]);
      check_class(module != nullptr, path, typeid(Contained).name());
      add_layer({path, {path}, bound(*module, function, std::make_index_sequence<std::tuple_size_v<Types> - 1>())});
    }
    return *this;
  }
  /// Adds the modules of the torch::nn::Sequential `name`, each a layer that takes and returns a tensor.
  PipelineLayers& add_sequential(const std::string& name);

  /// Says that parameter `name`, a member of several layers, is meant to be one weight where these lie on different ranks: each
  /// rank has a copy, and the gradients of the copies are added once a step. Without it that is an error of `split`.
  PipelineLayers& tie(const std::string& name);

  torch::nn::Module& model() const { return *model_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const std::vector<std::string>& ties() const { return ties_; }

 private:
  template <typename Callable>
  static Function wrapped(Callable function) {
    using Types = internal::pipeline::Arguments<Callable>;
    static_assert(std::tuple_size_v<Types> == 1 || std::tuple_size_v<Types> == 2,
                  "a layer's function takes its input, and maybe the micro-batch");
    return [function = std::move(function)](const PipelineValue& input, const PipelineValue& micro_batch) mutable {
      using internal::pipeline::from_value;
      if constexpr (std::tuple_size_v<Types> == 1) {
        return PipelineValue(function(from_value<std::tuple_element_t<0, Types>>(input)));
      } else {
        return PipelineValue(
            function(from_value<std::tuple_element_t<0, Types>>(input), from_value<std::tuple_element_t<1, Types>>(micro_batch)));
      }
    };
  }
  template <typename Contained, typename Callable, size_t... I>
  static Function bound(Contained& module, const Callable& function, std::index_sequence<I...>) {
    using Types = internal::pipeline::Arguments<Callable>;
    return wrapped([&module, function](const std::tuple_element_t<I + 1, Types>&... arguments) mutable {
      return function(module, arguments...);
    });
  }
  PipelineLayers& add_layer(Layer layer);
  std::vector<torch::nn::Module*> modules_of_list(const std::string& name) const;
  static void check_class(bool fits, const std::string& path, const char* wanted);

  torch::nn::Module* model_;
  std::vector<Layer> layers_;
  std::vector<std::string> ties_;
};

/// The mean time in seconds that each layer takes for a forward and a backward of `micro_batch`, over the ranks of `mesh`, the
/// same on all of them: for PipelineSplit::costs. The layers run one after another, twice and then `repeats` times. One whose
/// members are on the meta device has memory while it runs, with zeros in it. Every rank of the mesh calls it, before `split`.
std::vector<double> time_layers(const PipelineLayers& layers, const PipelineValue& micro_batch, const DeviceMesh& mesh,
                                int64_t repeats = 3);

} // namespace tessera
