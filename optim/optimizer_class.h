#pragma once

// Internal: what a class of optimizers keeps, so that nothing else needs to know the classes.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

#include <tessera/optim/state_layout.h>
#include <tessera/optim/state_value.h>

namespace tessera::internal {

/// A tensor, or a list of tensors, of the state that an optimizer keeps for each parameter.
struct TensorField {
  std::string name; ///< "exp_avg"
  StateLayout layout;
  bool is_list;
  std::function<std::vector<at::Tensor>(torch::optim::OptimizerParamState&)> get; ///< none, or one, where it is no list
  std::function<void(torch::optim::OptimizerParamState&, const std::vector<at::Tensor>&)> set;
};

/// A value of a parameter's state, of a group's options, or of the optimizer itself.
template <typename Holder>
struct ValueField {
  std::string name; ///< "lr"
  std::function<StateValue(Holder&)> get;
  std::function<void(Holder&, const StateValue&)> set; ///< the value has the type that `get` returns
};

/// What a class of optimizers keeps.
struct OptimizerClass {
  std::string name; ///< "AdamW"
  std::type_index type;
  std::function<bool(const torch::optim::Optimizer&)> is_instance; ///< of this class, or of one that derives from it
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  std::vector<TensorField> tensors;
  std::vector<ValueField<torch::optim::OptimizerParamState>> values;
  std::vector<ValueField<torch::optim::OptimizerOptions>> options;
  std::vector<ValueField<torch::optim::Optimizer>> own;
  bool flattens_parameters = false; ///< the state of the first parameter is that of all of them, one after the other
};

/// The description of `optimizer`'s class, or of the one registered last that it derives from; an error that names the class when
/// there is none.
const OptimizerClass& class_of(const torch::optim::Optimizer& optimizer);

/// Errors: a name or class that is there already, and names of fields that are taken, empty, or hold a dot.
void add_optimizer_class(OptimizerClass added);

/// The classes of LibTorch.
std::vector<OptimizerClass> torch_optimizers();

/// The error for an object that is not of the registered class.
[[noreturn]] void throw_other_class(const std::type_info& found, const std::type_info& registered);

} // namespace tessera::internal
