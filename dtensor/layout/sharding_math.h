#pragma once

#include <cstdint>
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
  /// than the one that starts here.
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
