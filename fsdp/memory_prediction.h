#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// What a prediction of memory cannot see in a model.
struct ExplainOptions {
  /// Tensors of a parameter's shape that the optimizer keeps for it: Adam has 2, SGD with momentum 1, SGD none.
  int64_t optimizer_tensors = 2;
  /// Bytes of activations that a forward of this rank's rows keeps for its backward, as without sharding.
  int64_t activation_bytes = 0;
};

/// Bytes of a rank in a training step after the first: the optimizer's state exists, and there are no gradients at the beginning.
struct MemoryPrediction {
  int64_t peak = 0;       ///< the most bytes at once: the sum of the following
  std::string peak_at;    ///< "forward of blocks.3", "backward of blocks.0", "optimizer"
  int64_t parameters = 0; ///< shards, parts kept beside them, and what is not sharded
  int64_t buffers = 0;    ///< of the modules
  int64_t optimizer_state = 0;
  int64_t gradients = 0;
  int64_t unsharded = 0;      ///< gathered parameters
  int64_t reduce_buffers = 0; ///< gradients before their reduction
  int64_t cached = 0;         ///< freed blocks of the two above, which the CPU's cache keeps; 0 on a device
  int64_t activations = 0;
  int64_t temporaries = 0; ///< a gradient that autograd has just made, or what the optimizer computes with
};

namespace internal {

class Held;
class ParameterGroup;
class ShardedModule;

/// Predicts the memory of the model below `root`. The sizes of `known` that no group decides are there already: buffers, and
/// parameters of no group with their state and their gradients.
MemoryPrediction predict_memory(const Held& held, ShardedModule& root, const ExplainOptions& options, MemoryPrediction known);

/// Bytes of the group's buffer of gradients, before they are reduced; 0 where they are not.
int64_t reduce_bytes_of(const ParameterGroup& group);

} // namespace internal

} // namespace tessera
