#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>

namespace tessera {

namespace internal {
struct MeshDim;
struct MeshState;
} // namespace internal

/// An n-dimensional arrangement of ranks. A cheap value: copies share one immutable state. Two meshes are equal if they have the
/// same device type, ranks, dim names, communicators of the program's own and place of this rank, and lie alike in roots of the
/// same ranks.
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
  /// mesh. Nothing is communicated, here and for the other meshes that are made of a mesh.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh operator[](const std::vector<std::string>& names) const;
  DeviceMesh operator[](std::initializer_list<const char*> names) const; ///< `mesh[{"shard", "cp"}]`
  /// The sub-mesh along the dims of these numbers, which rise.
  DeviceMesh slice(const std::vector<int64_t>& dims) const;
  /// All dims merged into one named `name` (default: the names joined by '_'). An error where the root has a dim of that name.
  DeviceMesh flatten(const std::string& name = "") const;
  /// Dim `dim` split into dims of `sizes`, row-major, named `names` if this mesh has names. An error unless the sizes multiply to
  /// the dim's, and where a dim that was flattened from dims which are no neighbours would be cut unevenly.
  DeviceMesh unflatten(int64_t dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names = {}) const;
  DeviceMesh unflatten(const std::string& dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names) const;
  /// The dims of several slices one after another, in any order: `concatenate({mesh["tp"], mesh["dp"]})`. An error if they are
  /// of roots with different ranks, overlap, or share a dim name, and for a rank outside.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  /// The mesh that this one was made of by slicing, flattening, splitting or concatenating; itself for any other.
  DeviceMesh root() const;
  /// The dim of the root that `dim` is; nothing if it is several of them or a part of one.
  std::optional<int64_t> root_dim(int64_t dim = 0) const;

  /// The communicator of the ranks that differ from this one only in `dim`, in the dim's order. All of these ranks make the first
  /// call, which connects them. Afterwards all meshes with the same ranks share it. The one that a program gave for the dim
  /// (`mesh_from_communicators`) serves all purposes. An error for a rank outside the mesh.
  CommunicatorPtr communicator(int64_t dim = 0, const std::string& purpose = "default") const;

  /// For example: DeviceMesh(cpu, [[0, 1], [2, 3]], names=("replicate", "shard")).
  std::string to_string() const;

  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b);
  size_t hash() const;

 private:
  explicit DeviceMesh(std::shared_ptr<const internal::MeshState> state) : impl_(std::move(state)) {}
  const internal::MeshState& impl() const; ///< an error when undefined
  int64_t wrap_dim(int64_t dim) const;
  const std::vector<int64_t>& own_coordinate() const;
  /// Made of `source`; `origin` is the place in its root where all indices are 0.
  static DeviceMesh of_dims(const DeviceMesh& source, std::vector<internal::MeshDim> dims, int64_t origin);

  friend DeviceMesh make_device_mesh(at::DeviceType, std::vector<int64_t>, RankList, std::vector<std::string>);
  friend DeviceMesh mesh_from_communicators(const std::vector<CommunicatorPtr>&, std::vector<int64_t>, const RankList&,
                                            std::vector<std::string>);
  std::shared_ptr<const internal::MeshState> impl_;
};

/// A mesh over the whole world, row-major. Every rank calls it. An error when the shape does not hold exactly the world's ranks
/// (PyTorch takes fewer: `make_device_mesh`), or a dim name appears twice or is empty.
DeviceMesh init_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, std::vector<std::string> dim_names = {});

/// A mesh over `ranks`, row-major over `shape`. Every rank calls it, ranks outside included; nothing is communicated.
DeviceMesh make_device_mesh(at::DeviceType device_type, std::vector<int64_t> shape, RankList ranks,
                            std::vector<std::string> dim_names = {});

/// A 1-D mesh of the communicator's ranks, in its order, on its device type, whose collectives run over it (PyTorch: from_group).
/// Every one of these ranks calls it. Its slices and what is made of them keep it, where a dim stays whole.
DeviceMesh mesh_from_communicator(const CommunicatorPtr& communicator, const std::string& dim_name = "");

/// A mesh over `ranks`, row-major over `shape`, with a communicator for each dim. Every rank of the mesh calls it, with the
/// communicators of the ranks that differ from it only in that dim. An error that names the first rank which stands elsewhere in
/// the communicator than in the mesh.
DeviceMesh mesh_from_communicators(const std::vector<CommunicatorPtr>& communicators, std::vector<int64_t> shape,
                                   const RankList& ranks, std::vector<std::string> dim_names = {});

} // namespace tessera
