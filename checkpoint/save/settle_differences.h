#pragma once

// Internal: plain tensors that ranks hold with different values.

#include <optional>
#include <string>

#include <tessera/checkpoint/differing_tensors.h>
#include <tessera/checkpoint/save/plan.h>
#include <tessera/checkpoint/save/snapshot.h>
#include <tessera/checkpoint/state/ranks.h>

namespace tessera::internal {

/// "kMean" and so on.
std::string name_of(checkpoint::DifferingTensors choice);

/// What `chosen` or else `set_differing_tensors` says, for a format that holds a tensor once; an error for kEachRank, which names
/// the format.
checkpoint::DifferingTensors choice_for_whole_tensors(const std::optional<checkpoint::DifferingTensors>& chosen,
                                                      const std::string& format);

/// Compares the plain tensors of all ranks and does what `choice` says with those that differ: changes this rank's `snapshot`
/// (a mean), or returns the plan to use in the place of `plan` (a tensor for each rank). Every rank calls it, with the same
/// choice. `target` is for the warning, which comes once in a process for the same names.
std::optional<SavePlan> settle_differences(const Ranks& ranks, checkpoint::DifferingTensors choice, const std::string& target,
                                           const SavePlan& plan, Snapshot& snapshot);

} // namespace tessera::internal
