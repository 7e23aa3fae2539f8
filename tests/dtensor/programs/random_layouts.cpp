#include "random_layouts.h"

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::testing {

using Sizes = std::vector<int64_t>;

namespace {

/// Of a mesh dim beside that of a RaggedShard of dims 0..`last`: one after it splits none of these.
Placement draw_beside_ragged(Random& random, int64_t ndim, int64_t last, bool is_before) {
  if (is_before && random.chance(40)) {
    const auto dim = random.below(ndim);
    return random.chance(70) ? Placement(Shard{dim}) : StridedShard{dim, 2 + random.below(2)};
  }
  const bool splits = last + 1 < ndim && random.chance(50);
  return splits ? Placement(Shard{last + 1 + random.below(ndim - last - 1)}) : Replicate{};
}

/// Of dims 0..`last` of what the mesh dims of `outer` leave; none where these leave nothing with a name.
Placement draw_ragged(Random& random, const Sizes& sizes, const Sizes& mesh_shape, const Placements& outer, int64_t last) {
  if (!internal::first_part_is_largest(outer, last)) return Replicate{};
  const auto ranks = mesh_shape[outer.size()];
  RaggedShard ragged{last, {}};
  auto left = internal::largest_positions(sizes, mesh_shape, outer, last);
  for (int64_t r = 0; r < ranks; ++r) {
    ragged.extents.push_back(r == ranks - 1 ? left : random.below(left + 1));
    left -= ragged.extents.back();
  }
  return ragged;
}

} // namespace

Placements draw_placements(Random& random, const Sizes& sizes, const Sizes& mesh_shape, bool reductions) {
  using Op = Partial::Op;
  constexpr Op kOps[]{Op::kSum, Op::kSum, Op::kAvg, Op::kMax, Op::kMin, Op::kMask};
  const auto op = random.of(kOps);
  const auto ndim = static_cast<int64_t>(sizes.size()), dims = static_cast<int64_t>(mesh_shape.size());
  Placements result;
  if (ndim > 0 && random.chance(12)) {
    const auto ragged_at = random.below(dims), last = random.below(ndim);
    for (int64_t m = 0; m < dims; ++m)
      result.push_back(m == ragged_at ? draw_ragged(random, sizes, mesh_shape, result, last)
                                      : draw_beside_ragged(random, ndim, last, m < ragged_at));
    return result;
  }
  for (int64_t m = 0; m < dims; ++m) {
    const auto kind = random.below(10);
    if (ndim > 0 && kind < 5) {
      result.push_back(Shard{random.below(ndim)});
    } else if (ndim > 0 && kind == 5) {
      result.push_back(StridedShard{random.below(ndim), 2 + random.below(2)});
    } else if (reductions && kind < 8) {
      result.push_back(Partial{op});
    } else {
      result.push_back(Replicate{});
    }
  }
  return result;
}

} // namespace tessera::testing
