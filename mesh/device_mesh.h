#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>

namespace tessera {

/// An n-dimensional arrangement of ranks. A cheap value: copies share one immutable state; equality and hash compare the
/// device type, the rank array, the dim names and this rank's place.
class DeviceMesh {
 public:
  DeviceMesh() = default;

  bool defined() const { return impl_ != nullptr; }
  at::DeviceType device_type() const;
  /// The device of this rank's tensors. If there are several CUDA devices, TESSERA_CUDA_DEVICE or the index of this process on
  /// its host selects one.
  at::Device device() const;
  int64_t ndim() const;
  int64_t size() const; ///< the number of ranks
  /// The number of ranks along one dim, the same for every rank. Here and below a negative dim counts from the last; an error for
  /// a dim outside [-ndim(), ndim()).
  int64_t size(int64_t dim) const;
  const std::vector<int64_t>& shape() const;         ///< the size of each dim
  const std::vector<std::string>& dim_names() const; ///< empty when unnamed
  /// Global ranks, row-major over `shape()`.
  const std::vector<int64_t>& ranks() const;
  /// The same without a list of all ranks, which `ranks()` makes.
  const RankList& rank_list() const;

  /// This rank's index in each dim; nothing for a rank outside the mesh.
  const std::optional<std::vector<int64_t>>& coordinate() const;
  /// This rank's index along one dim; an error for a rank outside the mesh.
  int64_t local_rank(int64_t dim = 0) const;
  int64_t local_rank(const std::string& name) const;
  int64_t dim_of(const std::string& name) const; ///< an error if no dim has this name, here and below

  /// The sub-mesh through this rank along the named dims, which are given in the mesh's order. An error for a rank outside the
  /// mesh.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  /// All dims merged into one named `name` (default: the names joined by '_').
  DeviceMesh flatten(const std::string& name = "") const;

  /// The communicator of the ranks that differ from this one only in `dim`, in the dim's order. All of these ranks make the first
  /// call, which connects them. Afterwards all meshes with the same ranks share it. An error for a rank outside the mesh.
  CommunicatorPtr communicator(int64_t dim = 0, const std::string& purpose = "default") const;

  /// For example: DeviceMesh(cpu, [[0, 1], [2, 3]], names=("replicate", "shard")).
  std::string to_string() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  size_t hash() const;

 private:
  struct Impl;
  explicit DeviceMesh(Impl impl);
  const Impl& impl() const; ///< an error when undefined
  int64_t wrap_dim(int64_t dim) const;
  const std::vector<int64_t>& own_coordinate() const;
  DeviceMesh slice(const std::vector<int64_t>& dims) const; ///< along increasing `dims`

  friend DeviceMesh make_device_mesh(at::DeviceType, std::vector<int64_t>, RankList, std::vector<std::string>);
  std::shared_ptr<const Impl> impl_;
};

/// A mesh over the whole world, row-major. Every rank calls it. An error when the shape does not hold exactly the world's ranks
/// (PyTorch takes fewer: `make_device_mesh`), or a dim name appears twice or is empty.
DeviceMesh init_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, std::vector<std::string> dim_names = {});

/// A mesh over `ranks`, row-major over `shape`. Every rank calls it, ranks outside included; nothing is communicated.
DeviceMesh make_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, RankList ranks,
                            std::vector<std::string> dim_names = {});

} // namespace tessera
