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
  /// The shape of this rank's local tensor.
  const std::vector<int64_t>& local_sizes() const { return local_sizes_; }

  /// "float[8, 4] (Shard(0), Replicate()) on DeviceMesh(…)".
  std::string to_string() const;

  /// The one spec with these values. Contiguous strides when `strides` is empty. Throws when a placement does not fit the tensor or the mesh.
  static std::shared_ptr<const Spec> intern(const DeviceMesh& mesh, Placements placements, std::vector<int64_t> sizes, at::ScalarType dtype,
                                            std::vector<int64_t> strides = {});

 private:
  Spec() = default;
  DeviceMesh mesh_;
  Placements placements_;
  std::vector<int64_t> sizes_, strides_, local_sizes_;
  at::ScalarType dtype_ = at::kFloat;
  int64_t numel_ = 0;
};

using SpecPtr = std::shared_ptr<const Spec>;

} // namespace tessera
