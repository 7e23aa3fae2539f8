#pragma once

#include <functional>

namespace examples {

/// The body of a program's main: runs `body`, and prints what it throws after the program's name. Returns the exit status.
int run_program(const char* name, const std::function<int()>& body);

/// Runs `worker` on `ranks` local processes, or, when `ranks` is 0, as the rank that the environment says. Returns the exit
/// status; throws as `tessera::launch`.
int run_ranks(int ranks, const std::function<void()>& worker);

} // namespace examples
