#pragma once

// Internal: what LibTorch's optimizers keep for each parameter, one description a class, so that nothing else needs to know the
// classes.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// A tensor of the state that an optimizer keeps for each parameter.
struct TensorField {
  std::string name; ///< "exp_avg"
  std::function<at::Tensor&(torch::optim::OptimizerParamState&)> access;
};

/// What a class of optimizers keeps for each parameter.
struct StateFields {
  std::string type; ///< "AdamW"
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  std::vector<TensorField> tensors;
  std::function<int64_t&(torch::optim::OptimizerParamState&)> step; ///< empty for an optimizer without steps
};

/// The description of `optimizer`'s class; an error that names the class when there is none (LBFGS, classes of the user's).
const StateFields& state_fields_of(const torch::optim::Optimizer& optimizer);

} // namespace tessera
