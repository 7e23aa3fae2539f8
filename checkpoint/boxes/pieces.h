#pragma once

// Internal: this rank's memory of a tensor, as boxes of the global tensor.

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/tensor/pieces.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// What is about to be done with the memory of a tensor.
enum class Access { kRead, kWrite };

/// An error that names the tensor `name` where a DTensor's memory does not stand for it: a view whose data had to move cannot be
/// written, nor read after its base was written; after `destroy_process_group` the other ranks are out of reach.
void check_access(const std::string& name, const at::Tensor& tensor, Access access);

/// What this rank holds of `tensor`: all of a plain tensor, its part of a DTensor (nothing on a rank outside the mesh). Empty
/// boxes are left out. `name` is for errors: those of `check_access`, a placement that no boxes describe, a meta tensor.
std::vector<Piece> pieces_of(const std::string& name, const at::Tensor& tensor, Access access);

/// True for a row-major tensor on the CPU whose memory holds its values as they are.
bool is_plain_memory(const at::Tensor& tensor);

/// True for plain tensors of one shape and dtype whose values have the same bits. Unlike `at::equal` it takes a NaN for itself.
bool equal_bytes(const at::Tensor& a, const at::Tensor& b);

/// How the tensor lies on its mesh, for people: "plain", or "(Shard(0)) on [4]".
std::string layout_of(const at::Tensor& tensor);

/// Tells the meshes of DTensors from each other, for people. Each is put into words once.
class MeshNames {
 public:
  /// Empty for a plain tensor. That of a large mesh ends with a checksum of what is left out.
  std::string of(const at::Tensor& tensor);

 private:
  std::vector<std::pair<DeviceMesh, std::string>> names_;
};

/// Tells autograd (and whoever compares versions) that the memory of `tensor`, and of a DTensor's local tensor, is about to be
/// written: what a forward saved of it, also unsharded, can be used no more.
void mark_written(const at::Tensor& tensor);

} // namespace tessera::internal
