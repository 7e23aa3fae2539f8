#pragma once

#include <gpt/model.h>
#include <gpt/options.h>
#include <tessera/collectives/counters.h>
#include <tessera/mesh/device_mesh.h>

#include <map>
#include <string>

namespace tessera::benchmarks {

/// Collectives that were started, by kind.
using CollectiveCounts = std::map<CollectiveKind, int64_t>;

/// A training step of the GPT of the examples on random bytes: forward, backward, clipping and AdamW. Every rank makes one, with
/// the same options, after `init_process_group`.
class TrainStep {
 public:
  explicit TrainStep(const gpt::Options& options);

  void run();

  /// Runs a step and counts this rank's collectives in each of its parts.
  struct PartCounts {
    CollectiveCounts forward, backward, clip, optimizer;
  };
  PartCounts count();

  /// This rank's bytes of parameters, gradients and optimizer state, after a step.
  int64_t state_bytes() const;
  int64_t parameter_count() const { return parameters_; }

 private:
  torch::Tensor loss();
  void clip();

  gpt::Gpt model_;
  DeviceMesh mesh_;
  torch::optim::AdamW optimizer_;
  double largest_norm_;
  int64_t parameters_;
  torch::Tensor inputs_, targets_;
};

} // namespace tessera::benchmarks
