#pragma once

#include <tessera/collectives/backends/hierarchical/host_layout.h>
#include <tessera/collectives/communicator.h>
#include <tessera/collectives/ranks/group_description.h>

#include <string>

namespace tessera::internal::hierarchical {

/// What came of an attempt to connect a group over hosts. The same on every rank.
struct Connection {
  CommunicatorPtr communicator; ///< null: none
  std::string refusal;          ///< why ranks of one host cannot share memory
};

/// Shares the memory of the ranks on each host, and connects every rank with all others. Called by every rank of the group.
/// Throws c10::Error as a wait of `GroupStore` does where a rank does not come.
Connection connect(const GroupDescription& group, const HostLayout& layout);

} // namespace tessera::internal::hierarchical
