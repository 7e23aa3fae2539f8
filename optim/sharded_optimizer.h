#pragma once

#include <torch/optim/optimizer.h>

namespace tessera {

/// What the optimizers share that are written for sharded parameters (`Lion`, `Lamb`, `Adafactor`, `Muon`, `AdamW8bit`). They are
/// `torch::optim::Optimizer`s with LibTorch's style of options and groups, take DTensors and plain tensors, and keep their state
/// as DTensors that lie as the parameters do. Every rank of the parameters' meshes takes a step, with gradients for the same
/// ones. One that is listed twice, as LibTorch's `parameters()` lists a tied weight, is stepped once. `state_dict`,
/// `checkpoint::save` and `load` know them without `register_optimizer`.
class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using Optimizer::Optimizer;
  /// Calls `closure` with grad mode, then takes a step without it, and returns the loss. Errors name the parameter's shape: a
  /// gradient that is sparse or complex, or that waits for its reduction.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Errors: torch::save would drop the state. `tessera::state_dict` holds it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  virtual void update() = 0;
};

} // namespace tessera
