#pragma once

// Internal: the settings among which a search chooses.

#include <cstdint>
#include <vector>

#include <tessera/plan/search.h>

namespace tessera::internal {

/// Settings that differ in their rows from those that follow from them.
struct Candidate {
  PlanSettings settings;   ///< with one row, and one micro-batch or those that a pipeline needs
  int64_t least_bytes = 0; ///< of parameters and optimizer state, less than which a rank cannot have
  double cost = 0;         ///< by which candidates are tried: the smaller, the earlier
};

/// All settings that fit the model and the machine, the likely fastest first. `parameters`: elements of the model.
std::vector<Candidate> candidates_of(const PlannedModel& model, const Machine& machine, const SearchOptions& options,
                                     int64_t parameters);

/// The micro-batches' rows to try for a candidate, rising, with the accumulation that belongs to each.
std::vector<PlanSettings> with_rows(const PlanSettings& settings, const SearchOptions& options);

} // namespace tessera::internal
