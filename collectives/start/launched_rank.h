#pragma once

#include <climits>
#include <cstdint>
#include <functional>

namespace tessera::internal {

/// What a rank that threw writes into the pipe, in one piece.
struct FailureRecord {
  int rank;
  bool consequence; ///< a connection was lost or timed out: another rank failed first
  int64_t nanoseconds;
  char text[3800];
};
static_assert(sizeof(FailureRecord) <= PIPE_BUF, "so that the ranks' records do not mix");

/// Reads a steady clock, comparable between processes of this machine.
int64_t now_in_nanoseconds();

/// Whether `launch` has started this process.
bool has_launch_pipe();

/// Whether the parent passes SIGUSR1 on to its ranks.
bool passes_signals_on();

/// The worker of `launch` in one of its ranks, and the status of the process: 1 where it threw, which the parent is told.
int run_as_rank(int ranks, const std::function<void()>& worker);

} // namespace tessera::internal
