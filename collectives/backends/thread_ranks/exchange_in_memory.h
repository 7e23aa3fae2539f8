#pragma once

#include <tessera/collectives/backends/thread_ranks/contribution.h>

#include <vector>

namespace tessera::internal {

/// Does a collective for all members, on their CPU memory. `members` are in the order of the group's ranks (of a message: who
/// sends, who receives), and have called the same.
void exchange_in_memory(const std::vector<Contribution>& members);

} // namespace tessera::internal
