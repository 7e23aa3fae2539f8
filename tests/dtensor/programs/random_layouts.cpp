#include "random_layouts.h"

#include <tessera/dtensor/layout/sharding_math.h>

namespace tessera::testing {

using Sizes = std::vector<int64_t>;

Placements draw_placements(Random& random, const Sizes& sizes, const Sizes& mesh_shape, bool reductions) {
  using Op = Partial::Op;
  constexpr Op kOps[]{Op::kSum, Op::kSum, Op::kAvg, Op::kMax, Op::kMin, Op::kMask};
  const auto op = random.of(kOps);
  const auto ndim = static_cast<int64_t>(sizes.size()), dims = static_cast<int64_t>(mesh_shape.size());
  Placements result;
  if (ndim > 0 && random.chance(12)) {
    const auto ragged_at = random.below(dims), last = random.below(ndim);
    for (int64_t m = 0; m < dims; ++m) {
      if (m != ragged_at) {
        result.push_back(last + 1 < ndim && random.chance(50) ? Placement(Shard{last + 1 + random.below(ndim - last - 1)})
                                                              : Replicate{});
        continue;
      }
      RaggedShard ragged{last, {}};
      auto left = internal::product(sizes, 0, static_cast<size_t>(last) + 1);
      for (int64_t r = 0; r < mesh_shape[m]; ++r) {
        ragged.extents.push_back(r == mesh_shape[m] - 1 ? left : random.below(left + 1));
        left -= ragged.extents.back();
      }
      result.push_back(ragged);
    }
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
