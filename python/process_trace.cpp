#include "process_trace.h"

#include <tessera/base/host_name.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/trace/signal_watch.h>

#include <c10/util/StringUtil.h>

#include <mutex>
#include <random>
#include <string>
#include <utility>

namespace tessera::python {

namespace {

struct ProcessTrace {
  std::mutex mutex;
  std::shared_ptr<internal::JobTrace> trace;
  std::unique_ptr<internal::SignalWatch> signal_watch; ///< for which it is written
};

/// Of the process, as PyTorch's groups are. Never destroyed: groups may outlive what the process destroys at its end.
ProcessTrace& of_process() {
  static auto* const trace = new ProcessTrace;
  return *trace;
}

/// What the first rank that comes draws. The same on all.
std::string job_name(c10d::Store& store) {
  std::random_device random;
  const auto drawn = c10::str("python-", random(), random());
  return store.compareSet("tessera/job", std::string(), drawn);
}

} // namespace

std::shared_ptr<internal::JobTrace> process_trace() {
  auto& process = of_process();
  const std::lock_guard lock(process.mutex);
  return process.trace;
}

void begin_process_trace(c10d::Store& store, int rank, int world_size) {
  const auto options = internal::trace_options(internal::current_environment());
  std::shared_ptr<internal::JobTrace> trace;
  if (options.calls > 0) {
    internal::TraceOwner owner{.job = job_name(store), .rank = rank, .world_size = world_size, .host = internal::host_name()};
    trace = std::make_shared<internal::JobTrace>(std::move(owner), options);
  }
  auto& process = of_process();
  const std::lock_guard lock(process.mutex);
  process.signal_watch.reset();
  process.trace = trace;
  if (!trace || options.folder.empty()) return;
  process.signal_watch = std::make_unique<internal::SignalWatch>();
  process.signal_watch->start([trace] { trace->write_unasked("SIGUSR1"); });
}

} // namespace tessera::python
