#pragma once

#include <tessera/collectives/process_group_options.h>

#include <functional>

namespace tessera {

/// Runs `program` for each of `ranks` ranks of a job, all of them threads of this process: with real data, for tests and in a
/// debugger. In such a thread `process_context()` belongs to its rank, without `init_process_group`. This also holds in the
/// backwards that it calls, and in the threads that LibTorch starts for it, but not in threads that `program` starts. Collectives
/// exchange CPU tensors in memory, compare their signatures, and time out as between processes.
///
/// Returns when all ranks have returned. If one throws, the ranks that wait for it, in a collective of any group, get an error
/// that names it. This call then throws the error that came first, with the number of its rank. Threads share everything that
/// exists once in a process, such as LibTorch's random generator: docs/limits.md.
void run_ranks_as_threads(int ranks, const std::function<void()>& program, const ProcessGroupOptions& options = {});

} // namespace tessera
