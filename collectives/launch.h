#pragma once

#include <functional>
#include <optional>

#include <tessera/collectives/launch_options.h>

namespace tessera {

/// Runs `worker` on `ranks` local processes.
///
/// The first process starts `ranks` copies of this program with the same arguments and the rank variables that
/// `init_process_group` reads, and waits for them. In each copy the same call runs `worker` and returns its status: 0, or 1
/// when it threw (the message goes to the parent). Use it as `return tessera::launch(4, worker);` in `main`.
/// In the first process it returns 0 when every rank did, and otherwise throws c10::Error with the first failing rank, its
/// message, its signal or its status, after the other ranks were stopped. A rank whose process ends with status 0 at any time
/// (`exit(0)` in the worker) has failed only where another rank waits for it after that: in a collective, while a group is made,
/// or in `init_process_group`.
///
/// A SIGTERM of the first process is passed on to the ranks, once, and they get a time to save and end:
/// `LaunchOptions::termination_seconds`. It then returns 0 if every rank ended with 0, 143 (128 + SIGTERM) if the signal ended
/// some, and throws if a rank failed, or had to be killed. It also returns 143 where all ranks end with that status, as those
/// that agree to end when one of them gets the signal. A handler that the program has for the signal is called in the first
/// process too; where the signal is ignored, nothing is passed on.
///
/// With `LaunchOptions::max_restarts` a job that failed begins again, also with fewer ranks.
///
/// The ranks die with the first process. The first process also hosts the store, on a free port of 127.0.0.1; an error if that
/// takes longer than TESSERA_TIMEOUT_SECONDS (300 if it is not set), or needs more file descriptors than the hard limit allows.
/// If OMP_NUM_THREADS is unset or empty, each of several ranks gets its share of the machine's cores, at least one. An error if
/// CUDA or a process group is already initialized, under another launcher, for more than 1024 ranks, for a second call in one
/// program, and if a copy calls it with another number of ranks. A standard stream that is closed becomes /dev/null, here and in
/// `init_process_group`.
int launch(int ranks, const std::function<void()>& worker, const LaunchOptions& options = {});

/// True in a process that `launch` started.
bool is_launched_rank();

/// The n of an argument `--ranks n` or `--ranks=n`; nothing when there is none. Throws c10::Error when n is no positive integer.
std::optional<int> ranks_from_args(int argc, const char* const* argv);

} // namespace tessera
