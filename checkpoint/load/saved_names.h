#pragma once

// Internal: what a checkpoint calls the entries of a state that loads from it, and what it holds by the names here.

#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/index.h>

namespace tessera::internal {

/// Tensors of a state are named as `LoadOptions::rename` says. Entries that a binding names after parameters follow these, to
/// where the checkpoint has entries of them: under the parameter's renamed name, that of an alias, or another name that the
/// checkpoint has for the same tensor.
class SavedNames {
 public:
  /// `options` and `index` outlive it.
  SavedNames(const StateDict& state, const Index& index, const checkpoint::LoadOptions& options);

  /// The name of a tensor of the state. Nothing where `rename` throws for a name that the filter refuses.
  std::optional<std::string> of_tensor(const std::string& name) const;
  std::string of_value(const std::string& name) const { return following(name).value_or(name); }
  /// What the checkpoint holds. Entries that are named after parameters, and the parameters, have their names here.
  const SavedState& contents() const { return contents_; }

 private:
  using Names = std::vector<std::string>;

  void add_binding(const StateBinding& binding, const StateDict& state);
  std::string parameter_there(const std::string& name, const Names& aliases, const NamedByParameters& entries,
                              const std::unordered_set<std::string>& listed) const;
  Names candidates(const std::string& name, const Names& aliases) const;
  SavedState contents_here() const;
  std::optional<std::string> following(const std::string& name) const;
  Names names_here(const std::string& saved) const;
  StateValue value_here(const std::string& name, const StateValue& value) const;

  const checkpoint::LoadOptions& options_;
  std::unordered_map<std::string, const IndexedTensor*> tensors_; // by name and alias
  std::unordered_map<std::string, std::string> there_;            // "optimizer.state.<parameter>" → the checkpoint's
  std::unordered_map<std::string, Names> here_;                   // the inverse
  std::map<std::string, std::string> parameters_;                 // their names here → in the checkpoint
  std::map<std::string, std::string> lists_;                      // where a binding's lists of parameters begin → its entries
  SavedState contents_;                                           // at first by the checkpoint's names
};

} // namespace tessera::internal
