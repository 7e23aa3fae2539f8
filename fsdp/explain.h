#pragma once

#include <tessera/fsdp/memory_prediction.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

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

/// How a model is sharded, and the predicted memory of a step.
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

/// Predicts the memory of a sharded model without running it, for a step of one forward, one backward and one optimizer step, in
/// which each group is gathered one ahead. It assumes that groups are read in the order of the last forward; before any forward,
/// in the order in which their modules are registered. State that is offloaded to the host counts as if it were on the device;
/// state in files does not count. For a parameter with a gather extension it assumes that each rank sends its part in the dtype
/// of forward. Settings of gathers (`set_prefetch_depth`, lists of modules, `set_unshard_in_backward`) and `no_sync` are ignored.
/// An error for a module that was not sharded. Local: no communication, and a single rank may call it.
Explanation explain(const torch::nn::Module& module, const ExplainOptions& options = {});

} // namespace tessera
