#include <tessera/dtensor/sharding_math.h>

#include <numeric>

namespace tessera {

Extent ragged_extent(const RaggedShard& placement, int64_t index) {
  const auto begin = placement.extents.begin();
  return {std::accumulate(begin, begin + index, int64_t{0}), placement.extents[index]};
}

int64_t product(c10::IntArrayRef sizes, size_t begin, size_t end) {
  int64_t result = 1;
  for (size_t i = begin; i < end; ++i) result *= sizes[i];
  return result;
}

LocalBox local_box(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                   const Placements& placements) {
  LocalBox box{sizes.vec(), std::vector<int64_t>(sizes.size(), 0)};
  const RaggedShard* ragged = nullptr;
  Extent ragged_part;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (const auto* shard = std::get_if<Shard>(&placements[i])) {
      const auto part = chunk_extent(box.sizes[shard->dim], mesh_shape[i], coordinate[i]);
      box.offsets[shard->dim] += part.offset;
      box.sizes[shard->dim] = part.size;
    } else if (const auto* found = std::get_if<RaggedShard>(&placements[i])) {
      ragged = found;
      ragged_part = ragged_extent(*found, coordinate[i]);
    }
  }
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (box.sizes[d] == 0 && sizes[d] != 0) box.offsets[d] = sizes[d];
  }
  if (ragged) {
    const auto leading = ragged->dim + 1;
    if (ragged_part.size == 0) ragged_part.offset = product(sizes, 0, leading);
    box.sizes.erase(box.sizes.begin(), box.sizes.begin() + ragged->dim);
    box.offsets.erase(box.offsets.begin(), box.offsets.begin() + ragged->dim);
    box.sizes[0] = ragged_part.size;
    box.offsets[0] = ragged_part.offset;
  }
  return box;
}

LocalBox local_box(c10::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements) {
  if (!mesh.coordinate()) return {{0}, {0}};
  return local_box(sizes, mesh.shape(), *mesh.coordinate(), placements);
}

PartialView view_without(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                         const Placements& placements, size_t mesh_dim) {
  auto others = placements;
  others[mesh_dim] = Replicate{};
  PartialView view{local_box(sizes, mesh_shape, coordinate, others).sizes, 0};
  for (const auto& placement : others) {
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) view.flattened = ragged->dim;
  }
  return view;
}

} // namespace tessera
