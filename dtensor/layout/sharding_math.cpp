#include <tessera/dtensor/layout/sharding_math.h>

#include <c10/util/accumulate.h>

#include <algorithm>

namespace tessera::internal {

Extent ragged_extent(const RaggedShard& placement, int64_t index) {
  const auto rank = static_cast<size_t>(index);
  return {placement.extents.sum_before(rank), placement.extents[rank]};
}

RaggedShard cut_at(const RaggedShard& ragged, c10::IntArrayRef sizes) {
  RaggedShard result{ragged.dim, {}};
  int64_t rest = product(sizes, 0, static_cast<size_t>(ragged.dim) + 1), begin = 0;
  for (const auto& run : ragged.extents.runs()) {
    const auto ranks = run.end - begin, whole = run.value > 0 ? std::min(ranks, rest / run.value) : ranks;
    begin = run.end;
    result.extents.append(whole, run.value);
    rest -= whole * run.value;
    if (whole == ranks) continue;
    result.extents.append(1, rest); // of the rank in which the part ends
    result.extents.append(ranks - whole - 1, 0);
    rest = 0;
  }
  return result;
}

std::optional<size_t> ragged_mesh_dim(const Placements& placements) {
  for (size_t m = 0; m < placements.size(); ++m) {
    if (std::holds_alternative<RaggedShard>(placements[m])) return m;
  }
  return std::nullopt;
}

namespace {

/// Whether all placements before the RaggedShard, if any, that split dims of it are such that `holds`.
template <typename Holds>
bool all_splits_before_ragged(const Placements& placements, const Holds& holds) {
  const auto end = ragged_mesh_dim(placements).value_or(0);
  return std::all_of(placements.begin(), placements.begin() + static_cast<int64_t>(end),
                     [&](const auto& outer) { return !shared_dim(outer, placements[end]) || holds(outer); });
}

} // namespace

bool is_nested(const Placements& placements) {
  return !all_splits_before_ragged(placements, [](const Placement&) { return false; });
}

bool ragged_is_one_range(const Placements& placements) {
  return all_splits_before_ragged(placements, [](const Placement& outer) { return outer == Placement(Shard{0}); });
}

bool first_part_is_largest(const Placements& placements, int64_t dim) {
  for (int64_t d = 0; d <= dim; ++d) {
    bool is_split = false;
    for (const auto& placement : placements) {
      if (is_replicate(placement) || !shards_dim(placement, d)) continue;
      if (is_split && is_strided(placement)) return false;
      is_split = true;
    }
  }
  return true;
}

int64_t largest_positions(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, const Placements& outer, int64_t dim) {
  const std::vector<int64_t> first(outer.size(), 0);
  return product(local_box(sizes, mesh_shape, first, outer).sizes, 0, static_cast<size_t>(dim) + 1);
}

bool splits_largest(const Placement& placement, const Placements& outer, c10::IntArrayRef sizes,
                    c10::ArrayRef<int64_t> mesh_shape) {
  const auto* ragged = std::get_if<RaggedShard>(&placement);
  if (!ragged) return true;
  const auto total = ragged->extents.sum_before(ragged->extents.size());
  return first_part_is_largest(outer, ragged->dim) && largest_positions(sizes, mesh_shape, outer, ragged->dim) == total;
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

/// The `index`-th element of `held`, ranges that are taken one after another.
int64_t element_of(const std::vector<Extent>& held, int64_t index) {
  auto range = held.begin();
  for (; index >= range->size; ++range) index -= range->size;
  return range->offset + index;
}

/// Makes one dim of the leading ones that a RaggedShard takes as one. `held`: the ranges of each of these dims that the box has.
void flatten_leading(LocalBox& box, const RaggedShard& ragged, int64_t rank, c10::IntArrayRef sizes,
                     const std::vector<std::vector<Extent>>& held) {
  const auto dims = static_cast<size_t>(ragged.dim) + 1;
  const auto part = ragged_extent(cut_at(ragged, box.sizes), rank);
  int64_t begin = 0, rest = part.offset, scale = 1;
  for (auto d = dims; part.size > 0 && d-- > 0; scale *= sizes[d]) {
    begin += scale * element_of(held[d], rest % box.sizes[d]);
    rest /= box.sizes[d];
  }
  box.sizes.erase(box.sizes.begin(), box.sizes.begin() + ragged.dim);
  box.offsets.erase(box.offsets.begin(), box.offsets.begin() + ragged.dim);
  box.sizes[0] = part.size;
  box.offsets[0] = part.size > 0 ? begin : product(sizes, 0, dims);
}

/// The part that the `Shard`s among `placements` leave.
LocalBox box_of_shards(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                       const Placements& placements) {
  LocalBox box{sizes.vec(), std::vector<int64_t>(sizes.size(), 0)};
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* shard = std::get_if<Shard>(&placements[i]);
    if (!shard) continue;
    const auto part = chunk_extent(box.sizes[shard->dim], mesh_shape[i], coordinate[i]);
    box.offsets[shard->dim] += part.offset;
    box.sizes[shard->dim] = part.size;
  }
  return box;
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
  auto box = box_of_shards(sizes, mesh_shape, coordinate, placements);
  const auto place = ragged_mesh_dim(placements);
  const auto* ragged = place ? &std::get<RaggedShard>(placements[*place]) : nullptr;
  const bool strided = std::any_of(placements.begin(), placements.end(), is_strided);
  std::vector<std::vector<Extent>> held; // of the dims that the RaggedShard takes as one
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<Extent> ranges;
    if (strided) {
      ranges = dim_extents(sizes[d], mesh_shape, coordinate, placements, static_cast<int64_t>(d));
      box.offsets[d] = ranges.empty() ? 0 : ranges[0].offset;
      box.sizes[d] = 0;
      for (const auto& range : ranges) box.sizes[d] += range.size;
    } else if (ragged) {
      ranges = {{box.offsets[d], box.sizes[d]}};
    }
    if (ragged && static_cast<int64_t>(d) <= ragged->dim) held.push_back(std::move(ranges));
    if (box.sizes[d] == 0 && sizes[d] != 0) box.offsets[d] = sizes[d];
  }
  if (ragged) flatten_leading(box, *ragged, coordinate[*place], sizes, held);
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
