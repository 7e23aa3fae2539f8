#pragma once

// Internal: what a load will do.

#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/index.h>

namespace tessera::checkpoint {

/// A tensor of the state and the saved tensors that its data comes from; more than one when tied names were saved apart.
struct TensorRead {
  const StateDict::Entry* entry;
  std::vector<const IndexedTensor*> saved;
};

struct LoadPlan {
  std::vector<TensorRead> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
  std::vector<std::string> missing;    ///< names of the state that the checkpoint lacks
  std::vector<std::string> unused;     ///< names in the checkpoint that the state lacks
  std::vector<std::string> mismatches; ///< one line for each difference in shape, dtype or type
};

/// Matches the entries of `state` with what `index` holds, by name or alias on either side. The plan points into both.
LoadPlan plan_load(const StateDict& state, const Index& index, const LoadOptions& options);

/// One indented line a name; after the first 20 only how many more there are.
std::string listing(const std::vector<std::string>& names);

} // namespace tessera::checkpoint
