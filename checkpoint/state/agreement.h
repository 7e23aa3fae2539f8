#pragma once

// Internal: agreement on what ranks gather or load together.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <tessera/checkpoint/state/ranks.h>

namespace tessera::internal {

/// What this rank is about to do, for comparison with the others.
class Agreement {
 public:
  /// A tensor that these ranks of the job gather or load together, in the order of the calls.
  void add(const std::vector<int64_t>& ranks, const std::string& tensor) { tensors_[ranks] += tensor + "\n"; }
  /// What every rank that has something of this name must have alike, as text for people.
  void add_settings(const std::string& name, std::string settings) { settings_[name] = std::move(settings); }
  /// Writes what the other ranks compare.
  std::string to_message() const;
  /// Ranks that gather or load together must do so with the same tensors, or they would mix different ones, or wait for each
  /// other. `messages` are those of all `ranks`; `step` and
  /// `difference` are for the error, "rank 1 would <difference> than rank 0".
  static void check(const std::vector<std::string>& messages, const Ranks& ranks, const std::string& step,
                    const std::string& difference = "gather other tensors");

 private:
  using Tensors = std::map<std::vector<int64_t>, std::string>; // by ranks
  static void check_tensors(const std::vector<Tensors>& all, const Ranks& ranks, const std::string& step,
                            const std::string& difference);
  using Settings = std::map<std::string, std::string>; // by name
  static void check_settings(const std::vector<Settings>& all, const Ranks& ranks);

  Tensors tensors_;
  Settings settings_;
};

} // namespace tessera::internal
