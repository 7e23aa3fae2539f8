#pragma once

#include <tessera/collectives/trace/flight_recorder.h>

#include <cstddef>
#include <string>

namespace tessera::internal {

/// Whose record it is.
struct TraceOwner {
  std::string job; ///< the same on all ranks of a job, and on no other job's
  int rank = 0, world_size = 1;
  std::string host;
};

/// What tools/trace/tessera-trace reads. `reason`: why it is written.
std::string to_json(const TraceOwner& owner, const FlightRecorder::Snapshot& snapshot, size_t capacity,
                    const std::string& reason);

/// Writes FOLDER/rank-<rank>.json, mode 0600, whole or not at all. Makes the folder. An error that names the file and the cause.
void write_trace_file(const std::string& folder, int rank, const std::string& text);

} // namespace tessera::internal
