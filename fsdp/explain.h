#pragma once

#include <tessera/fsdp/memory_prediction.h>
#include <tessera/fsdp/summary.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

/// How a model is sharded, and the predicted memory of a step.
struct Explanation {
  int64_t rank = 0;
  std::vector<GroupSummary> groups; ///< from the root down
  MemoryPrediction memory;

  /// A table of groups, and one of memory by category.
  std::string to_string() const;
  /// An object with the names of the fields above, and `"format": "tessera explanation"`, `"version": 1`.
  std::string to_json() const;
};

std::ostream& operator<<(std::ostream& out, const Explanation& explanation);

/// Predicts the memory of a sharded model without running it, for a step of one forward, one backward and one optimizer step. It
/// runs the machine that decides a step, with the settings of now: of gathers (`set_prefetch_depth`, lists of modules), of what
/// is freed, and of reductions (`no_sync`: gradients wait, and no optimizer steps). It assumes that groups are read as in the
/// last forward, and that a backward is as the last one: what it recomputes, which groups it reads, which gradient of a group
/// comes last. Before any forward, groups are read in the order in which their modules are registered, and every backward reads
/// them. State that is offloaded to the host counts as if it were on the device;
/// state in files does not count. For a parameter with a gather extension it assumes that each rank sends its part in the dtype
/// of forward. The messages of a quantized reduction do not count, what its error feedback keeps does.
/// An error for a module that was not sharded. Local: no communication, and a single rank may call it.
Explanation explain(const torch::nn::Module& module, const ExplainOptions& options = {});

} // namespace tessera
