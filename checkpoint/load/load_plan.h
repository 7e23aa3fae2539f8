#pragma once

// Internal: what a load will do, and to what.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/boxes/pieces.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/export/export_names.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/state/agreement.h>

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

/// The state that a load writes to. A load writes its tensors in place. Its entries change in `finish` alone: until then, what
/// its bindings make of it is a copy, which shares the tensors.
class LoadTarget {
 public:
  explicit LoadTarget(StateDict& target) : target_(target) {}

  /// Has the bindings fit their entries to what `index` holds, and matches the entries that the filter accepts with it, by name
  /// or alias on either side. Of a tensor that was saved for each rank, plain tensors take that of `rank`. The plan points into
  /// `index`. Errors: those of the bindings, and a filter that accepts a part of a binding's entries.
  LoadPlan& prepare(const Index& index, const checkpoint::LoadOptions& options, int rank);
  const LoadPlan& plan() const { return plan_; }
  /// Adds what the bindings say of their settings.
  void add_settings(Agreement& agreement) const;
  /// All tensors have been read: sets the values, and hands the bindings their entries.
  void finish();

 private:
  StateDict& state() { return changed_ ? *changed_ : target_; }

  StateDict& target_;
  std::optional<StateDict> changed_;
  std::vector<StateBinding*> bindings_; // those that take part
  LoadPlan plan_;
};

/// Sets the pieces of every tensor. Errors: those of `pieces_of`.
void find_pieces(LoadPlan& plan);

} // namespace tessera::internal
