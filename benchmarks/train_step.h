#pragma once

#include <gpt/model.h>
#include <gpt/options.h>
#include <tessera/mesh/device_mesh.h>

#include <cstdint>
#include <functional>

namespace tessera::benchmarks {

/// A training step of the GPT of the examples on random bytes: forward, backward, clipping and AdamW. Every rank makes one, with
/// the same options, after `init_process_group`.
class TrainStep {
 public:
  explicit TrainStep(const gpt::Options& options);

  void run();

  /// Runs a step and tells `observe` when each of its parts has ended: "forward", "backward", "clip", "optimizer".
  void run(const std::function<void(const char* part)>& observe);

  /// This rank's bytes of parameters, gradients and optimizer state, after a step.
  int64_t state_bytes();
  int64_t parameter_count() const { return parameters_; }

 private:
  gpt::Gpt model_;
  DeviceMesh mesh_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  double largest_norm_;
  int64_t parameters_;
  torch::Tensor inputs_, targets_;
};

} // namespace tessera::benchmarks
