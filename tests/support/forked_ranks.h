#pragma once

#include <functional>

namespace tessera::testing {

/// Runs `worker` on `ranks` local processes, as `launch` does for a program, but in forks of this one: LibTorch is loaded once,
/// and that takes longer than most tests. Before anything else, because a fork has none of this process's threads. Returns 0, or
/// 1 where a worker did not, after a line that names the first such rank; the others are killed two seconds later.
int run_forked_ranks(int ranks, const std::function<int()>& worker);

/// Runs `work` in a fork of this process, which ends with this process, and returns its status, or 128 and the number of the
/// signal that ended it.
int run_in_child(const std::function<int()>& work);

} // namespace tessera::testing
