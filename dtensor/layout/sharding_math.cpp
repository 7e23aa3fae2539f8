#include <tessera/dtensor/layout/sharding_math.h>

#include <c10/util/accumulate.h>

#include <algorithm>

namespace tessera::internal {

Extent ragged_extent(const RaggedShard& placement, int64_t index) {
  const auto rank = static_cast<size_t>(index);
  return {placement.extents.sum_before(rank), placement.extents[rank]};
}

namespace {

void append(std::vector<Extent>& extents, Extent next) {
  if (next.size == 0) return;
  if (!extents.empty() && extents.back().offset + extents.back().size == next.offset) {
    extents.back().size += next.size;
  } else {
    extents.push_back(next);
  }
}

/// What `part` is of the ranges `held`, taken one after another.
void append_part(std::vector<Extent>& result, const std::vector<Extent>& held, Extent part) {
  int64_t before = 0;
  for (const auto& range : held) {
    const auto begin = std::max(part.offset, before), end = std::min(part.offset + part.size, before + range.size);
    if (begin < end) append(result, {range.offset + begin - before, end - begin});
    before += range.size;
  }
}

/// Makes one dim of the leading ones that a RaggedShard takes as one.
void flatten_leading(LocalBox& box, const RaggedShard& ragged, Extent part, c10::IntArrayRef sizes) {
  if (part.size == 0) part.offset = product(sizes, 0, ragged.dim + 1);
  box.sizes.erase(box.sizes.begin(), box.sizes.begin() + ragged.dim);
  box.offsets.erase(box.offsets.begin(), box.offsets.begin() + ragged.dim);
  box.sizes[0] = part.size;
  box.offsets[0] = part.offset;
}

} // namespace

std::vector<Extent> strided_extents(int64_t size, int64_t split_factor, int64_t parts, int64_t index) {
  std::vector<Extent> result;
  for (int64_t c = 0; c < split_factor; ++c) {
    const auto chunk = chunk_extent(size, split_factor, c);
    if (chunk.size == 0) break;
    const auto part = chunk_extent(chunk.size, parts, index);
    append(result, {chunk.offset + part.offset, part.size});
  }
  return result;
}

std::vector<Extent> dim_extents(int64_t size, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                                const Placements& placements, int64_t dim) {
  std::vector<Extent> held;
  append(held, {0, size});
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!shards_dim(placements[m], dim) || std::holds_alternative<RaggedShard>(placements[m])) continue;
    int64_t count = 0;
    for (const auto& range : held) count += range.size;
    std::vector<Extent> parts;
    if (const auto* strided = std::get_if<StridedShard>(&placements[m])) {
      parts = strided_extents(count, strided->split_factor, mesh_shape[m], coordinate[m]);
    } else {
      parts = {chunk_extent(count, mesh_shape[m], coordinate[m])};
    }
    std::vector<Extent> kept;
    for (const auto& part : parts) append_part(kept, held, part);
    held = std::move(kept);
  }
  return held;
}

int64_t product(c10::IntArrayRef sizes, size_t begin, size_t end) {
  return c10::multiply_integers(sizes.begin() + begin, sizes.begin() + end);
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
  const bool strided = std::any_of(placements.begin(), placements.end(), is_strided);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (strided) {
      const auto held = dim_extents(sizes[d], mesh_shape, coordinate, placements, static_cast<int64_t>(d));
      box.offsets[d] = held.empty() ? 0 : held[0].offset;
      box.sizes[d] = 0;
      for (const auto& range : held) box.sizes[d] += range.size;
    }
    if (box.sizes[d] == 0 && sizes[d] != 0) box.offsets[d] = sizes[d];
  }
  if (ragged) flatten_leading(box, *ragged, ragged_part, sizes);
  return box;
}

LocalBox local_box(c10::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements) {
  if (!mesh.coordinate()) return {{0}, {0}};
  return local_box(sizes, mesh.shape(), *mesh.coordinate(), placements);
}

std::vector<int64_t> coordinate_of(int64_t index, c10::ArrayRef<int64_t> mesh_shape) {
  std::vector<int64_t> coordinate(mesh_shape.size());
  for (auto d = mesh_shape.size(); d-- > 0; index /= mesh_shape[d]) coordinate[d] = index % mesh_shape[d];
  return coordinate;
}

PartialView view_without(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                         const Placements& placements, c10::ArrayRef<size_t> mesh_dims) {
  auto others = placements;
  for (const auto m : mesh_dims) others[m] = Replicate{};
  PartialView view{local_box(sizes, mesh_shape, coordinate, others).sizes, 0};
  for (const auto& placement : others) {
    if (const auto* ragged = std::get_if<RaggedShard>(&placement)) view.flattened = ragged->dim;
  }
  return view;
}

} // namespace tessera::internal
