#include <tessera/base/edit_distance.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera::internal {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    auto diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const auto replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string nearest_of(std::string_view name, const std::vector<std::string>& names) {
  const auto nearest = std::ranges::min_element(names, {}, [&](const auto& each) { return edit_distance(name, each); });
  return nearest == names.end() ? "" : *nearest;
}

} // namespace tessera::internal
