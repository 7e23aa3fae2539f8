#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

/// Collectives of one kind, counted as `CollectiveCounters` does: the payload is the larger of input and output.
struct Traffic {
  int64_t calls = 0, bytes = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

/// What one group of a model did.
struct GroupReport {
  std::string name; ///< what errors and collectives call it
  Traffic all_gathers, reduce_scatters, all_reduces;
  double gather_wait_seconds = 0; ///< for which reads stood still until a gather was done: its exposed time
  double reduce_wait_seconds = 0; ///< for which the backward stood still for the group's reductions
  int64_t prefetch_hits = 0;      ///< first reads of a forward or backward that found the gather begun
  int64_t prefetch_misses = 0;    ///< those that had to begin it
  int64_t unsharded_bytes = 0;    ///< that a rank holds while the group is gathered; 0 where nothing is copied
};

/// What this rank did since reporting began, or since the report before: a step, where the program asks after each.
struct StepReport {
  int64_t rank = 0;
  double seconds = 0;               ///< of the program's time
  int64_t peak_unsharded_bytes = 0; ///< most bytes of gathered parameters at once
  std::vector<GroupReport> groups;  ///< those that did anything, from the root down

  Traffic all_gathers() const;
  Traffic reduce_scatters() const;
  Traffic all_reduces() const;
  /// For which the program stood still for collectives.
  double exposed_seconds() const;

  /// A table of the groups, and sums.
  std::string to_string() const;
  /// An object with the names of the fields above, and `"format": "tessera step report"`, `"version": 1`.
  std::string to_json() const;
};

std::ostream& operator<<(std::ostream& out, const StepReport& report);

} // namespace tessera
