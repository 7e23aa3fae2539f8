#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// How a tensor lies on a mesh: the mesh, one placement a mesh dim, and the global shape, strides and dtype.
///
/// Specs are interned: equal specs are the same object, so comparing and hashing pointers is enough. `intern` validates.
class Spec {
 public:
  const DeviceMesh& mesh() const { return mesh_; }
  const Placements& placements() const { return placements_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t numel() const { return numel_; }
  /// The shape of this rank's local tensor; [0] for a rank outside the mesh.
  const std::vector<int64_t>& local_sizes() const { return local_sizes_; }
  /// Where the local tensor starts in the global one; see LocalBox.
  const std::vector<int64_t>& local_offsets() const { return local_offsets_; }
  /// False on a rank outside the mesh.
  bool on_mesh() const { return mesh_.coordinate().has_value(); }
  /// A number that no other spec of this process has or had.
  uint64_t id() const { return id_; }

  bool is_replicated() const;
  bool has_partial() const;
  /// The RaggedShard among the placements, if any (there is at most one).
  const RaggedShard* ragged() const;

  /// "float[8, 4] (Shard(0), Replicate()) on DeviceMesh(…)".
  std::string to_string() const;

  /// The one spec with these values. Contiguous strides when `strides` is empty. Throws when a placement does not fit the
  /// tensor or the mesh: a dim out of range, extents that do not add up, a RaggedShard whose leading dims a later mesh dim
  /// shards as well, or different Partial reductions. Specs that nobody holds are dropped. Any thread may call it.
  static std::shared_ptr<const Spec> intern(const DeviceMesh& mesh, Placements placements, std::vector<int64_t> sizes,
                                            at::ScalarType dtype, std::vector<int64_t> strides = {});
  /// This spec with other placements.
  std::shared_ptr<const Spec> with(Placements placements) const;

 private:
  friend class SpecPool;
  Spec() = default;
  DeviceMesh mesh_;
  Placements placements_;
  uint64_t id_ = 0;
  std::vector<int64_t> sizes_, strides_, local_sizes_, local_offsets_;
  at::ScalarType dtype_ = at::kFloat;
  int64_t numel_ = 0;
};

using SpecPtr = std::shared_ptr<const Spec>;

/// Row-major strides of `sizes`, as PyTorch computes them (a dim of size 0 counts as 1).
std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes);

} // namespace tessera
