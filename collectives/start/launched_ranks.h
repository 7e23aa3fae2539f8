#pragma once

#include <tessera/collectives/launch_options.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <exception>

namespace tessera::internal {

struct LaunchedJob {
  int ranks;
  int restart; ///< how often the job was started before
};

struct LaunchedEnd {
  int status = 0;                       ///< 0 if the ranks ended well, 128 + SIGTERM if that signal ended some
  std::exception_ptr failure = nullptr; ///< what the first to fail said of itself
  bool is_terminated = false;           ///< there was a SIGTERM
};

/// Starts the ranks of `launch` and returns when all have ended, or were stopped after a failure. `store`: the job's, which this
/// process hosts. Throws where they cannot be started.
LaunchedEnd run_launched_ranks(const LaunchedJob& job, c10d::TCPStore& store, const LaunchOptions& options);

} // namespace tessera::internal
