#pragma once

// Internal: which groups of a model have gradients that are not reduced, and which are being reduced.

#include <cstddef>
#include <utility>
#include <vector>

#include <tessera/fsdp/schedule/step_groups.h>

namespace tessera::internal {

/// The groups whose gradients wait for their reduction, or did of late, and the reductions in flight: at most one reduce-scatter
/// and one all-reduce.
class ReductionQueue {
 public:
  /// `groups` lives as long as this.
  explicit ReductionQueue(StepGroups& groups) : groups_(groups) {}
  /// The number of groups, before the first event.
  void set_groups(size_t count) { is_unfinished_.assign(count, false); }

  const std::vector<size_t>& unfinished() const { return unfinished_; }
  void add_unfinished(size_t group) {
    if (!is_unfinished_[group]) add(group);
  }
  void forget(size_t group) {
    std::erase(unfinished_, group);
    is_unfinished_[group] = false;
  }
  /// Forgets those that have nothing any more that waits.
  void forget_finished() {
    std::erase_if(unfinished_, [&](size_t group) {
      is_unfinished_[group] = groups_.residence(group) != Residence::kGone && groups_.is_unfinished(group);
      return !is_unfinished_[group];
    });
  }
  /// Forgets all. Returns those that were unfinished.
  std::vector<size_t> give_up() {
    in_flight_.clear();
    for (const size_t group : unfinished_) is_unfinished_[group] = false;
    return std::exchange(unfinished_, {});
  }

  /// Starts the reduction of `group` when those before it have ended: all, or all but one where there are two collectives.
  void start(size_t group) {
    groups_.finish_reduction(group); // the one before, when a group is reduced twice in a backward
    while (!in_flight_.empty()) {
      const size_t oldest = in_flight_.front();
      groups_.advance_reduction(oldest);
      if (groups_.rules(oldest).reductions != Reductions::kOne && in_flight_.size() < 2) break;
      in_flight_.erase(in_flight_.begin());
      groups_.finish_reduction(oldest);
    }
    if (!groups_.start_reduction(group)) return;
    if (groups_.rules(group).reductions == Reductions::kSecondOne) groups_.advance_reduction(group); // to it
    in_flight_.push_back(group);
  }
  void finish() {
    for (const size_t group : std::exchange(in_flight_, {})) groups_.finish_reduction(group);
  }

 private:
  void add(size_t group) {
    is_unfinished_[group] = true;
    unfinished_.push_back(group);
  }

  StepGroups& groups_;
  std::vector<size_t> unfinished_, in_flight_;
  std::vector<char> is_unfinished_; // by the groups' numbers
};

} // namespace tessera::internal
