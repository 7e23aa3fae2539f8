#pragma once

#include "process_request.h"

namespace tessera::testing {

/// The variable whose value is the descriptor of a zygote's connection: the program is to be one.
inline constexpr const char* kZygoteVariable = "TESSERA_TEST_ZYGOTE";

/// Forks this process for each request that comes over the connection, and ends it with the connection. It returns in the forks:
/// each is a child of the process that asked (`fork_from_zygote`), and what the request says, but for its signals, which are all
/// blocked. This process may have one thread alone, since a fork has no other.
ProcessRequest serve_as_zygote(int connection);

/// Asks the zygote, a child of this process, for a fork, which becomes a child of this process. Returns its pid. Throws an error
/// where the zygote has ended, or cannot fork.
pid_t fork_from_zygote(int connection, const ProcessRequest& request);

/// A connection to a zygote, the second end of which is the zygote's. Both are marked close-on-exec.
struct ZygoteConnection {
  int own = -1, zygotes = -1;
};
ZygoteConnection connect_zygote();

} // namespace tessera::testing
