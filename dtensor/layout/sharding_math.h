#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// A range of one dim, or of several leading dims taken as one.
struct Extent {
  int64_t offset = 0;
  int64_t size = 0;
  bool operator==(const Extent&) const = default;
};

/// The `index`-th of torch.chunk's `parts` parts of a dim of `size`; an empty part's offset is `size`.
inline Extent chunk_extent(int64_t size, int64_t parts, int64_t index) {
  const int64_t chunk = (size + parts - 1) / parts;
  const int64_t begin = chunk * index < size ? chunk * index : size;
  const int64_t end = begin + chunk < size ? begin + chunk : size;
  return {begin, end - begin};
}

/// The `index`-th part of a RaggedShard, over its flattened leading dims; an empty part's offset is the sum before it.
Extent ragged_extent(const RaggedShard& placement, int64_t index);

/// `ragged` of a part of shape `sizes`, which may be smaller than the largest one: its ranks' ranges end where the part does.
RaggedShard cut_at(const RaggedShard& ragged, c10::IntArrayRef sizes);

/// The mesh dim of the RaggedShard, if any (there is at most one).
std::optional<size_t> ragged_mesh_dim(const Placements& placements);

/// Whether mesh dims before that of the RaggedShard split dims that it takes as one.
bool is_nested(const Placements& placements);

/// Whether a rank's part under a RaggedShard, if any, is one range of the flattened leading dims: what splits them before is
/// Shard(0) alone.
bool ragged_is_one_range(const Placements& placements);

/// Whether the first ranks of all mesh dims have the largest part of each of the dims 0..`dim`: true unless a StridedShard splits
/// what an earlier mesh dim has split.
bool first_part_is_largest(const Placements& placements, int64_t dim);

/// The positions of the flattened dims 0..`dim` in the largest part that the mesh dims of `outer`, the first ones, leave: those
/// that a RaggedShard on the next one splits.
int64_t largest_positions(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, const Placements& outer, int64_t dim);

/// True unless `placement` is a RaggedShard whose extents are not those of the part that the mesh dims of `outer` leave. They
/// have none.
bool splits_largest(const Placement& placement, const Placements& outer, c10::IntArrayRef sizes,
                    c10::ArrayRef<int64_t> mesh_shape);

/// The `index`-th of `parts` parts of a StridedShard of a dim of `size`: ranges in rising order, none of them empty, neighbours
/// joined.
std::vector<Extent> strided_extents(int64_t size, int64_t split_factor, int64_t parts, int64_t index);

/// The ranges of tensor dim `dim`, of global `size`, that the rank at `coordinate` of a mesh of `mesh_shape` holds, in the order
/// in which they lie in its local tensor; none of them empty. The Shards and StridedShards of that dim apply left to right, other
/// placements do not count.
std::vector<Extent> dim_extents(int64_t size, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                                const Placements& placements, int64_t dim);

/// Product of sizes[begin..end).
int64_t product(c10::IntArrayRef sizes, size_t begin, size_t end);

/// One rank's part of a tensor.
struct LocalBox {
  /// Shape of the local tensor. Under a RaggedShard its leading dims are one.
  std::vector<int64_t> sizes;
  /// Where it starts in the global tensor, per local dim (the dim's global size when empty); under a RaggedShard the first
  /// entry counts positions of the flattened leading dims. Under a StridedShard the local tensor holds more ranges (dim_extents)
  /// than the one that starts here; under a RaggedShard it does unless `ragged_is_one_range`.
  std::vector<int64_t> offsets;
  bool operator==(const LocalBox&) const = default;
};

/// The part of the rank at `coordinate` of a mesh of `mesh_shape`, in O(dims). Splits of one tensor dim over several mesh dims
/// apply left to right. `sizes` is the global shape; the placements fit it (Spec::intern checks).
LocalBox local_box(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                   const Placements& placements);

/// The box of this rank; for a rank outside the mesh an empty tensor: sizes [0], offsets [0].
LocalBox local_box(c10::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements);

/// The coordinate of the `index`-th rank of a mesh of `mesh_shape`.
std::vector<int64_t> coordinate_of(int64_t index, c10::ArrayRef<int64_t> mesh_shape);

/// The global shape before the splits of `mesh_dims`: all the other splits of `placements` applied for this rank's
/// coordinate. `flattened` is the number of leading dims that a RaggedShard on another mesh dim merged into dim 0, less one:
/// global dim d is dim d - flattened of `sizes`.
struct PartialView {
  std::vector<int64_t> sizes;
  int64_t flattened = 0;
};
PartialView view_without(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                         const Placements& placements, c10::ArrayRef<size_t> mesh_dims);

} // namespace tessera::internal
