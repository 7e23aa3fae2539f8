#pragma once

// Internal: one description a class of LibTorch's optimizers, so that the rest of the checkpoint code does not know them.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>

namespace tessera {

/// A tensor of the state that an optimizer keeps for each parameter.
struct TensorField {
  std::string name; ///< "exp_avg"
  std::function<at::Tensor&(torch::optim::OptimizerParamState&)> access;
};

/// An option of a parameter group.
struct OptionField {
  std::string name; ///< "lr"
  std::function<StateValue(const torch::optim::OptimizerOptions&)> get;
  std::function<void(torch::optim::OptimizerOptions&, const StateValue&)> set; ///< the value has the type that `get` returns
};

/// What a class of optimizers keeps.
struct OptimizerFields {
  std::string type; ///< "AdamW"
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  std::vector<TensorField> tensors;
  std::function<int64_t&(torch::optim::OptimizerParamState&)> step; ///< empty for an optimizer without steps
  std::vector<OptionField> options;
};

/// The description of `optimizer`'s class; an error that names the class when there is none.
const OptimizerFields& fields_of(const torch::optim::Optimizer& optimizer);

} // namespace tessera
