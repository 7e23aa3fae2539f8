#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

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

/// Product of sizes[begin..end).
int64_t product(c10::IntArrayRef sizes, size_t begin, size_t end);

/// One rank's part of a tensor.
struct LocalBox {
  /// Shape of the local tensor. Under a RaggedShard its leading dims are one.
  std::vector<int64_t> sizes;
  /// Where it starts in the global tensor, per local dim (the dim's global size when empty); under a RaggedShard the first
  /// entry counts positions of the flattened leading dims.
  std::vector<int64_t> offsets;
};

/// The part of the rank at `coordinate` of a mesh of `mesh_shape`, in O(dims). Shards of one tensor dim over several mesh dims
/// apply left to right. `sizes` is the global shape; the placements fit it (Spec::intern checks).
LocalBox local_box(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                   const Placements& placements);

/// As above for this rank; for a rank outside the mesh an empty tensor: sizes [0], offsets [0].
LocalBox local_box(c10::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements);

/// The global shape before the split of mesh dim `mesh_dim`: all the other splits of `placements` applied for this rank's
/// coordinate. `flattened` is the number of leading dims that a RaggedShard on another mesh dim merged into dim 0, less one:
/// global dim d is dim d - flattened of `sizes`.
struct PartialView {
  std::vector<int64_t> sizes;
  int64_t flattened = 0;
};
PartialView view_without(c10::IntArrayRef sizes, c10::ArrayRef<int64_t> mesh_shape, c10::ArrayRef<int64_t> coordinate,
                         const Placements& placements, size_t mesh_dim);

} // namespace tessera
