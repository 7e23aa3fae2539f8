#include <ATen/ops/cat.h>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

std::vector<int64_t> part_sizes(const std::vector<int64_t>& sizes, const Placement& placement, int64_t ranks, int64_t rank) {
  return local_box(sizes, {ranks}, {rank}, {placement}).sizes;
}

at::Tensor part_of(const at::Tensor& whole, const Placement& placement, int64_t ranks, int64_t rank) {
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    const auto part = chunk_extent(whole.size(shard->dim), ranks, rank);
    return whole.narrow(shard->dim, part.offset, part.size);
  }
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    std::vector<at::Tensor> parts{whole.narrow(strided->dim, 0, 0)};
    for (const auto& part : strided_extents(whole.size(strided->dim), strided->split_factor, ranks, rank)) {
      parts.push_back(whole.narrow(strided->dim, part.offset, part.size));
    }
    return at::cat(parts, strided->dim);
  }
  const auto& ragged = std::get<RaggedShard>(placement);
  const auto part = ragged_extent(ragged, rank);
  auto rows = part_sizes(whole.sizes().vec(), placement, ranks, rank);
  rows[0] = product(whole.sizes(), 0, ragged.dim + 1);
  return whole.reshape(rows).narrow(0, part.offset, part.size);
}

at::Tensor slice(const at::Tensor& local, const Transition& transition) {
  return part_of(local, transition.to, transition.ranks(), transition.rank());
}

std::vector<Extent> flat_ranges(const std::vector<int64_t>& sizes, const Placement& placement, int64_t ranks) {
  std::vector<Extent> ranges;
  const auto* ragged = std::get_if<RaggedShard>(&placement);
  const auto scale = product(sizes, ragged ? ragged->dim + 1 : 1, sizes.size());
  int64_t offset = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const auto size = (ragged ? ragged->extents[r] : chunk_extent(sizes[0], ranks, r).size) * scale;
    ranges.push_back({offset, size});
    offset += size;
  }
  return ranges;
}

} // namespace tessera::internal::redistribute
