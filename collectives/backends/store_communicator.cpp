#include <tessera/collectives/backends/store_communicator.h>

#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/backends/shared_memory/memory/arenas.h>
#include <tessera/collectives/backends/single_rank.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/rendezvous.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera::internal {

namespace {

// A group that is made anew, with the store of the old one, must not find its keys.
c10::intrusive_ptr<c10d::Store> store_of_this_time(const StoreGroup& group) {
  const auto times = group.store->add(c10::str("tessera/times/", group.rank), 1);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("tessera/", times), group.store);
}

std::shared_ptr<RankWatch> watch_over(const StoreGroup& group, const Places& places,
                                      const c10::intrusive_ptr<c10d::Store>& store) {
  std::vector<std::string> processes(static_cast<size_t>(1 + *std::max_element(group.ranks.begin(), group.ranks.end())));
  for (size_t i = 0; i < group.ranks.size(); ++i) processes[static_cast<size_t>(group.ranks[i])] = places.processes[i];
  return std::make_shared<RankWatch>(group.ranks[static_cast<size_t>(group.rank)], processes, store, store);
}

void check(const StoreGroup& group) {
  TORCH_CHECK_VALUE(group.rank >= 0 && static_cast<size_t>(group.rank) < group.ranks.size(), "group ", group.name, ": rank ",
                    group.rank, " is not in [0, ", group.ranks.size(), ")");
  for (const auto rank : group.ranks) TORCH_CHECK_VALUE(rank >= 0, "group ", group.name, ": the rank ", rank, " is negative");
}

} // namespace

CommunicatorPtr make_communicator(const StoreGroup& group, at::DeviceType device_type) {
  check(group);
  if (group.ranks.size() == 1) return make_single_rank_communicator(group.name, group.ranks[0], device_type);
  const auto store = store_of_this_time(group);
  const auto places = meet({store, group.ranks, group.rank, group.options, c10::str("group ", group.name)});
  std::vector<int64_t> indices(group.ranks.size());
  std::iota(indices.begin(), indices.end(), 0);
  GroupDescription description{.name = group.name, .ranks = group.ranks, .rank = group.rank, .options = group.options};
  const auto own = places.hosts.begin() + group.rank;
  description.local_rank = static_cast<int>(std::count(places.hosts.begin(), own, *own));
  description.hosts = places.hosts_of(indices);
  description.watch = watch_over(group, places, store);
  description.arenas = std::make_shared<shared_memory::Arenas>();
  description.store = c10::make_intrusive<GroupStore>("group", store, group.ranks, description.watch);
  return make_backend_communicator(description, device_type);
}

} // namespace tessera::internal
