#pragma once

// Internal: what a load will do.

#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/agreement.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/export_names.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/pieces.h>

namespace tessera::internal {

/// A tensor of the state and the saved tensors that its data comes from; more than one when tied names were saved apart.
struct TensorRead {
  std::string name;
  at::Tensor tensor;
  std::vector<const IndexedTensor*> saved;
  std::vector<Piece> pieces; ///< this rank's memory of it, after `find_pieces`
};

struct LoadPlan {
  std::vector<TensorRead> tensors;
  std::vector<std::pair<std::string, StateValue>> values;
  std::vector<std::string> missing;    ///< names of the state that the checkpoint lacks
  std::vector<std::string> looked_for; ///< those names in the checkpoint
  std::vector<std::string> unused;     ///< names in the checkpoint that the state lacks
  std::vector<std::string> mismatches; ///< one line for each difference in shape, dtype or type
  bool could_cast = false;             ///< some of them are of dtypes alone, which `LoadOptions::cast` allows
};

/// Matches the entries of `state` that `filter` accepts with what `index` holds, by name or alias on either side. Of a tensor
/// that was saved for each rank, plain tensors take that of `rank`. The plan points into `index`.
LoadPlan plan_load(const StateDict& state, const Index& index, const checkpoint::LoadOptions& options, int rank);

/// The objects bound to `state` that a load with this filter (null: all) hands their entries. An error for one of whose entries
/// it accepts a part.
std::vector<StateBinding*> bindings_of(const StateDict& state, const SavedState& saved, const NameFilter& filter);

/// Adds what they say of their settings.
void add_settings(const std::vector<StateBinding*>& bindings, Agreement& agreement);

/// Sets the pieces of every tensor. Errors: those of `pieces_of`.
void find_pieces(LoadPlan& plan);

} // namespace tessera::internal
