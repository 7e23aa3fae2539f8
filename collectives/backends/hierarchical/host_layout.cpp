#include <tessera/collectives/backends/hierarchical/host_layout.h>

#include <algorithm>

namespace tessera::internal::hierarchical {

std::vector<int> HostLayout::column_places(int of_column) const {
  std::vector<int> column_of_hosts;
  for (const auto& host_places : places) column_of_hosts.push_back(host_places[of_column]);
  return column_of_hosts;
}

std::pair<int, int> HostLayout::find(int place) const {
  for (int each = 0; each < hosts(); ++each)
    for (int column_there = 0; column_there < columns(); ++column_there)
      if (places[each][column_there] == place) return {each, column_there};
  return {-1, -1};
}

std::optional<HostLayout> HostLayout::of(const std::vector<int>& hosts, int rank) {
  HostLayout layout;
  for (size_t place = 0; place < hosts.size(); ++place) {
    const auto host = static_cast<size_t>(hosts[place]);
    if (host >= layout.places.size()) layout.places.resize(host + 1);
    if (static_cast<int>(place) == rank) {
      layout.host = hosts[place];
      layout.column = static_cast<int>(layout.places[host].size());
    }
    layout.places[host].push_back(static_cast<int>(place));
  }
  if (layout.hosts() < 2 || layout.columns() < 2) return std::nullopt;
  const bool is_even = std::all_of(layout.places.begin(), layout.places.end(),
                                   [&](const auto& each) { return each.size() == layout.places[0].size(); });
  return is_even ? std::optional(layout) : std::nullopt;
}

} // namespace tessera::internal::hierarchical
