#pragma once

#include <tessera/collectives/process_group_options.h>

#include <functional>

namespace tessera {

/// Runs `program` for each of `ranks` ranks of a job, all of them threads of this process: with real data, for tests and in a
/// debugger. In such a thread `process_context()` is its rank's own, without `init_process_group`; so it is in the backwards that
/// it calls, and in the threads that LibTorch starts for it, but not in those that `program` starts. Collectives exchange CPU
/// tensors in memory, compare their signatures, and time out as between processes.
///
/// Returns when all ranks have. Where one throws, those that wait for it, in a collective of any group, get an error that names
/// it, and this call throws the first rank's error in time, with its number. Threads share what a process has once, such as
/// LibTorch's random generator: docs/limits.md.
void run_ranks_as_threads(int ranks, const std::function<void()>& program, const ProcessGroupOptions& options = {});

} // namespace tessera
