#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

/// What a prediction of memory cannot see in a model.
struct ExplainOptions {
  /// Tensors of a parameter's shape that the optimizer keeps for it: Adam has 2, SGD with momentum 1, SGD none.
  int64_t optimizer_tensors = 2;
  /// What a forward leaves for its backward, of this rank's rows: as much as it does without sharding.
  int64_t activation_bytes = 0;
};

/// A call of `fully_shard` or `replicate` that took parameters, on this rank.
struct GroupExplanation {
  std::string name;            ///< what errors and collectives call it
  std::string mesh;            ///< "4 ranks", "2 x 2 ranks"
  std::string strategy;        ///< its row of `kStrategies`
  std::string layout;          ///< "ragged" or "per-parameter"
  int64_t parameters = 0;      ///< how many
  int64_t shard_bytes = 0;     ///< this rank's part, in the parameters' dtypes
  int64_t unsharded_bytes = 0; ///< while gathered, in the dtypes that a forward reads; 0 where nothing is copied
  int64_t reduce_bytes = 0;    ///< of a buffer of its gradients, in the reduce dtype; 0 where nothing is reduced
  int64_t padding_bytes = 0;   ///< of what is unsharded, beyond the parameters
  bool reshards_after_forward = false;
};

/// Bytes of a rank, in a training step after the first: the optimizer's state is there, and no gradients are when it begins.
struct MemoryPrediction {
  int64_t peak = 0;       ///< the most at once: the sum of what follows
  std::string peak_at;    ///< "forward of blocks.3", "backward of blocks.0", "optimizer"
  int64_t parameters = 0; ///< shards, parts kept beside them, and what is not sharded
  int64_t buffers = 0;    ///< of the modules
  int64_t optimizer_state = 0;
  int64_t gradients = 0;
  int64_t unsharded = 0;      ///< gathered parameters
  int64_t reduce_buffers = 0; ///< gradients before their reduction
  int64_t cached = 0;         ///< blocks that were one of these two, kept for the next
  int64_t activations = 0;
  int64_t temporaries = 0; ///< a gradient that autograd has just made, or what the optimizer computes with
};

/// How a model is sharded, and what a step of it is expected to hold in memory.
struct Explanation {
  int64_t rank = 0;
  std::vector<GroupExplanation> groups; ///< from the root down
  MemoryPrediction memory;

  /// A table of groups, and one of memory by category.
  std::string to_string() const;
  /// An object with the names of the fields above, and `"format": "tessera explanation"`, `"version": 1`.
  std::string to_json() const;
};

std::ostream& operator<<(std::ostream& out, const Explanation& explanation);

/// Predicts from what is sharded, without running it: groups are taken to be read in the order in which their modules are
/// registered, each gathered one ahead, in a step of one forward, one backward and one optimizer step. What is offloaded to the
/// host counts as if it was on the device; what is in files does not count. An error for a module that was not sharded. Local: no
/// communication, and any rank may call it alone.
Explanation explain(const torch::nn::Module& module, const ExplainOptions& options = {});

} // namespace tessera
