#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace tessera::internal::hierarchical {

/// The places of the ranks of a group: on several hosts, and equally many on each. The c-th ranks of all hosts are a column.
struct HostLayout {
  int host = 0, column = 0;             ///< of this rank
  std::vector<std::vector<int>> places; ///< in the group, by host and column

  int hosts() const { return static_cast<int>(places.size()); }
  int columns() const { return static_cast<int>(places[0].size()); }
  int own_place() const { return places[host][column]; }
  std::vector<int> column_places(int of_column) const;
  std::pair<int, int> find(int place) const; ///< its host and column

  /// `hosts`: the number of each rank's host. Nothing where the ranks are on one host, one on each, or not as many on each.
  static std::optional<HostLayout> of(const std::vector<int>& hosts, int rank);
};

} // namespace tessera::internal::hierarchical
