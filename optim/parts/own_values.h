#pragma once

// Internal: the registered values that an optimizer and its groups hold.

#include <torch/optim/optimizer.h>

#include <vector>

#include <tessera/optim/optimizer_class.h>

namespace tessera::internal {

/// The registered values of an optimizer and its groups at one moment: where a step is taken in parts, each part must find them
/// as the first did.
class OwnValues {
 public:
  OwnValues(torch::optim::Optimizer& optimizer, const OptimizerClass& kept);
  void put_back() const;

 private:
  torch::optim::Optimizer& optimizer_;
  const OptimizerClass& class_;
  std::vector<StateValue> own_, options_;
};

} // namespace tessera::internal
