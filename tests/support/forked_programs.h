#pragma once

#include "process_request.h"

namespace tessera::testing {

/// Starts a zygote of the program (preloaded_main.cpp) at this process's first call for it. Returns whether a fork of it
/// with these variables behaves as one that is started: LibTorch and OpenMP read some as they are loaded. Under a sanitizer
/// nothing is forked.
bool may_be_forked(const std::string& program, const std::vector<std::string>& variables);

/// Forks the program `request.arguments[0]` from its zygote, after `may_be_forked`. Returns the pid of what is a child of this
/// process.
pid_t fork_program(const ProcessRequest& request);

} // namespace tessera::testing
