#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

/// Without the further names of a parameter, which LibTorch lists as well.
std::vector<torch::Tensor> distinct(const std::vector<torch::Tensor>& parameters);

/// Which optimizer, and over which parameters: the same for a model and its twin.
struct OptimizerPlan {
  explicit OptimizerPlan(Draw& draw);
  std::string name() const;
  /// Over all parameters of `module` but the last `held_back`; those too, as a second group, when `has_second_group`.
  std::unique_ptr<torch::optim::Optimizer> make(const torch::nn::Module& module) const;
  /// Over these.
  std::unique_ptr<torch::optim::Optimizer> over(const std::vector<torch::Tensor>& parameters) const;
  /// Adds the parameters that were held back as a second group; false when there are none.
  bool add_group(torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

  size_t kind = 0;
  size_t held_back = 0;
  bool has_second_group = false;
  bool lists_twice = false; ///< every name of a tied parameter counts, as in LibTorch's `parameters()`
};

} // namespace tessera::testing::scripts
