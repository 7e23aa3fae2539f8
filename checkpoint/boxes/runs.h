#pragma once

// Internal: a box inside two larger boxes, as runs of elements that lie one after another in both.

#include <cstdint>
#include <vector>

#include <tessera/dtensor/layout/box.h>

namespace tessera::internal {

/// Calls `visit(first, second, length)` for each run of `common` in row-major order: the position of its first element in
/// row-major `a`, in row-major `b`, and its length, all in elements. `common`, not empty, lies within both.
template <typename Visit>
void for_each_run(const Box& common, const Box& a, const Box& b, const Visit& visit) {
  const auto ndim = static_cast<int64_t>(common.sizes.size());
  // Dims after `split` are whole in both boxes, so a run spans them and the dim `split`.
  int64_t split = ndim - 1, length = 1;
  while (split > 0 && common.sizes[split] == a.sizes[split] && common.sizes[split] == b.sizes[split])
    length *= common.sizes[split--];
  if (split >= 0) length *= common.sizes[split];
  std::vector<int64_t> index(static_cast<size_t>(ndim), 0); // within `common`
  const auto position = [&](const Box& box) {
    int64_t at = 0;
    for (int64_t d = 0; d < ndim; ++d) at = at * box.sizes[d] + common.offsets[d] - box.offsets[d] + index[d];
    return at;
  };
  while (true) {
    visit(position(a), position(b), length);
    int64_t d = split - 1;
    while (d >= 0 && ++index[d] == common.sizes[d]) index[d--] = 0;
    if (d < 0) return;
  }
}

} // namespace tessera::internal
