#pragma once

#include <tessera/collectives/launch_options.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <exception>

#include <tessera/collectives/start/termination_watch.h>

namespace tessera::internal {

struct LaunchedJob {
  int ranks;
  int restart; ///< how often the job was started before
};

struct LaunchedEnd {
  int status = 0;                       ///< 0 if the ranks ended well, 128 + SIGTERM if that signal ended some
  std::exception_ptr failure = nullptr; ///< what the first to fail said of itself
};

/// Starts the ranks of `launch` and returns when all have ended, or were stopped after a failure. `store`: the job's, which this
/// process hosts. A SIGTERM of `terminations` is passed on to the ranks, one that has arrived before too. Throws where they
/// cannot be started.
LaunchedEnd run_launched_ranks(const LaunchedJob& job, c10d::TCPStore& store, TerminationWatch& terminations,
                               const LaunchOptions& options);

} // namespace tessera::internal
