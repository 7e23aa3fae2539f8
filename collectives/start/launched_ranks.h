#pragma once

#include <tessera/collectives/launch_options.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera::internal {

/// Starts the ranks of `launch` and returns when all have ended: 0 if they ended well, 128 + SIGTERM if that signal ended some.
/// Throws what the first to fail said of itself, after the others were stopped. `store`: the job's, which this process hosts.
int run_launched_ranks(int ranks, c10d::TCPStore& store, const LaunchOptions& options);

} // namespace tessera::internal
