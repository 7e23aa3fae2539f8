#pragma once

#include <tessera/collectives/backends/shared_memory/engine.h>
#include <tessera/collectives/backends/shared_memory/memory/arena.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/group_description.h>

#include <memory>
#include <string>

namespace tessera::internal::shared_memory {

/// What came of an attempt to share memory. The same on every rank: one who cannot keeps all from it.
struct Connection {
  std::shared_ptr<Engine> engine; ///< null: none
  std::shared_ptr<Arena> arena;   ///< this process's, where all can read those of all
  std::string refusal;            ///< why there is none: "rank 3: mmap of 100 bytes: Cannot allocate memory"

  CommunicatorPtr communicator(const GroupDescription& group) const;
};

/// Whether all ranks are processes of this host that know each other by their numbers. The same on every rank.
bool can_reach_each_other(const GroupDescription& group);
/// Makes the group's segment on its first rank, and opens it on the others. Called by every rank of the group.
/// Throws c10::Error as a wait of `GroupStore` does where a rank does not come.
Connection connect(const GroupDescription& group);

} // namespace tessera::internal::shared_memory
