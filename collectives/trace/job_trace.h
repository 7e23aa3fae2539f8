#pragma once

#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/trace/flight_recorder.h>
#include <tessera/collectives/trace/trace_file.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

namespace tessera::internal {

struct TraceOptions {
  std::string folder; ///< TESSERA_TRACE_FOLDER: empty where nothing is written unasked
  int calls = 1000;   ///< TESSERA_TRACE_CALLS: how many are kept; 0: nothing is recorded
};
TraceOptions trace_options(const EnvironmentMap& environment);

/// The record of this rank, and when it is written.
class JobTrace {
 public:
  JobTrace(TraceOwner owner, TraceOptions options);

  FlightRecorder& recorder() { return recorder_; }
  /// What the recorder's do. The first failure and the first refusal of this process are written to the folder, if there is one.
  void fail(uint64_t number, const std::string& failure);
  void refuse(uint64_t number, const std::string& failure);

  /// Throws where the file cannot be written.
  void write(const std::string& folder, const std::string& reason) const;
  /// Writes to the folder of the options, if there is one. Warns at most once, and throws nothing.
  void write_unasked(const std::string& reason) noexcept;

 private:
  const TraceOwner owner_;
  const TraceOptions options_;
  const int fork_depth_ = fork_depth();
  FlightRecorder recorder_;
  mutable std::mutex writing_;
  std::atomic<bool> has_failed_{false}, has_refused_{false}, has_warned_{false};
};

} // namespace tessera::internal
