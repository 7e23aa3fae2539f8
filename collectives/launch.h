#pragma once

#include <functional>

namespace tessera {

struct LaunchOptions {
  /// How long the other ranks may go on after one failed, before they are killed.
  int grace_seconds = 2;
};

/// Runs `worker` on `ranks` local processes.
///
/// The first process starts `ranks` copies of this program with the same arguments and the rank variables that
/// `init_process_group` reads, and waits for them. In each copy the same call runs `worker` and returns its status: 0, or 1
/// when it threw (the message goes to the parent). Use it as `return tessera::launch(4, worker);` in `main`.
/// In the first process it returns 0 when every rank did, and otherwise throws c10::Error with the first failing rank, its message
/// or its signal, after the other ranks were stopped. An error when CUDA or a process group is already up.
int launch(int ranks, const std::function<void()>& worker, const LaunchOptions& options = {});

/// True in a process that `launch` started.
bool is_launched_rank();

} // namespace tessera
