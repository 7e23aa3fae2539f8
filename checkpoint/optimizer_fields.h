#pragma once

// Internal: the state and the options of LibTorch's optimizers, one description a class.

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/optim/state_fields.h>

namespace tessera {

/// An option of a parameter group.
struct OptionField {
  std::string name; ///< "lr"
  std::function<StateValue(const torch::optim::OptimizerOptions&)> get;
  std::function<void(torch::optim::OptimizerOptions&, const StateValue&)> set; ///< the value has the type that `get` returns
};

/// What a class of optimizers keeps.
struct OptimizerFields {
  const StateFields& state;
  std::vector<OptionField> options;
};

/// The description of `optimizer`'s class; an error that names the class when there is none.
OptimizerFields fields_of(const torch::optim::Optimizer& optimizer);

} // namespace tessera
