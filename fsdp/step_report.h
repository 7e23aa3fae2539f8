#pragma once

#include <tessera/collectives/counters.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace tessera {

/// Collectives of one kind.
using Traffic = CollectiveCounters::Count;

/// What one group of a model did.
struct GroupReport {
  std::string name; ///< what errors and collectives call it
  Traffic all_gathers, reduce_scatters, all_reduces;
  double gather_wait_seconds = 0; ///< time that reads waited for a gather (exposed time)
  double reduce_wait_seconds = 0; ///< time that the backward waited for the group's reductions (exposed time)
  /// The device's streams wait, and the host goes on: the two times are the host's, and say nothing of what was exposed.
  bool waits_on_streams = false;
  int64_t prefetch_hits = 0;   ///< first reads of a forward or backward that found the gather already begun
  int64_t prefetch_misses = 0; ///< first reads that had to begin it
  int64_t unsharded_bytes = 0; ///< bytes on a rank while the group is gathered; 0 if nothing is copied
};

/// What this rank did since reporting began, or since the last report: one step, if the program asks after each step.
struct StepReport {
  int64_t rank = 0;
  double seconds = 0;               ///< elapsed time
  int64_t peak_unsharded_bytes = 0; ///< most bytes of gathered parameters at once
  std::vector<GroupReport> groups;  ///< the groups that did anything, from the root down

  /// Sums over all groups.
  Traffic all_gathers() const;
  Traffic reduce_scatters() const;
  Traffic all_reduces() const;
  /// Time that the program waited for collectives, of the groups whose waits are the host's.
  double exposed_seconds() const;

  /// A table of the groups, and sums; "-" for waits on streams.
  std::string to_string() const;
  /// An object with the names of the fields above, and `"format": "tessera step report"`, `"version": 1`. Waits on streams are
  /// null.
  std::string to_json() const;
};

std::ostream& operator<<(std::ostream& out, const StepReport& report);

} // namespace tessera
