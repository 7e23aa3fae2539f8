#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/collectives/process_group_options.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/rank_watch.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace tessera::internal::shared_memory {
class Arenas;
} // namespace tessera::internal::shared_memory

namespace tessera::internal {

/// What a backend needs to connect a group of two or more ranks.
struct GroupDescription {
  std::string name;
  std::vector<int64_t> ranks;  ///< global, in group order
  int rank = 0;                ///< this process's index in `ranks`
  int local_rank = 0;          ///< its index on its host
  std::vector<int> hosts = {}; ///< of each rank, numbered in the order of their first ranks; empty: all are on one
  ProcessGroupOptions options;
  c10::intrusive_ptr<GroupStore> store; ///< this group's own keys
  c10::intrusive_ptr<GroupStore> whole; ///< those of the group that this one is a part of; null: of none
  std::shared_ptr<RankWatch> watch;
  std::shared_ptr<shared_memory::Arenas> arenas; ///< of this process, for all groups

  /// The keys with which ranks say that they leave the group, with all of its parts.
  c10::intrusive_ptr<c10d::Store> departures() const { return whole ? whole : store; }
  bool all_local() const { return std::set(hosts.begin(), hosts.end()).size() <= 1; }
};

} // namespace tessera::internal
