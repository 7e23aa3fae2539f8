#include <tessera/collectives/backends/hierarchical/connect.h>

#include <tessera/collectives/backends/hierarchical/hierarchical_communicator.h>
#include <tessera/collectives/backends/shared_memory/connect.h>
#include <tessera/collectives/ranks/group_store.h>

#include <c10/util/StringUtil.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::internal::hierarchical {

namespace {

constexpr const char* kNotSeen = "the ranks of its host do not see each other's processes";

std::string inside_key(int64_t rank) { return c10::str("inside/", rank); }

GroupDescription part_of(const GroupDescription& group, const std::vector<int>& places, int rank, const std::string& prefix) {
  auto part = group;
  part.rank = rank;
  part.ranks.clear();
  part.hosts.clear();
  for (const int place : places) part.ranks.push_back(group.ranks[place]);
  part.whole = group.store;
  part.store = c10::make_intrusive<GroupStore>(prefix, group.store, part.ranks, group.watch);
  return part;
}

std::shared_ptr<gloo::Channel> connect_channel(const GroupDescription& group,
                                               std::function<void(const std::string&)> on_failure = nullptr) {
  const gloo::ChannelOptions options{
      group.options.timeout, group.options.check_collectives, false, group.ranks, group.watch, group.departures(),
      std::move(on_failure)};
  return gloo::Channel::connect(group.store, group.rank, static_cast<int>(group.ranks.size()), options);
}

/// The first refusal that a rank of the group has to tell.
std::string agree_on_refusal(const GroupDescription& group, const std::string& own) {
  group.store->set(inside_key(group.rank), own);
  std::vector<std::string> keys;
  for (size_t place = 0; place < group.ranks.size(); ++place) keys.push_back(inside_key(static_cast<int64_t>(place)));
  for (const auto& refusal : group.store->multiGet(keys))
    if (!refusal.empty()) return {refusal.begin(), refusal.end()};
  return "";
}

} // namespace

Connection connect(const GroupDescription& group, const HostLayout& layout) {
  auto inside = part_of(group, layout.places[layout.host], layout.column, c10::str("host/", layout.host));
  inside.name = c10::str(group.name, " (within a host)");
  shared_memory::Connection shared{nullptr, nullptr, c10::str("rank ", group.ranks[group.rank], ": ", kNotSeen)};
  if (shared_memory::can_reach_each_other(inside)) shared = shared_memory::connect(inside);
  if (auto refusal = agree_on_refusal(group, shared.refusal); !refusal.empty()) return {nullptr, std::move(refusal)};

  auto links = std::make_shared<Links>();
  links->layout = layout;
  links->inside = shared.engine;
  links->all = connect_channel(group, [inside = links->inside](const std::string& failure) { inside->fail(failure); });
  links->column =
      connect_channel(part_of(group, layout.column_places(layout.column), layout.host, c10::str("column/", layout.column)));
  links->arena = shared.arena;
  links->watch = group.watch;
  return {std::make_shared<HierarchicalCommunicator>(group.name, group.ranks, group.rank, std::move(links),
                                                     shared.communicator(inside)),
          ""};
}

} // namespace tessera::internal::hierarchical
