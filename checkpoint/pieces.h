#pragma once

// Internal: this rank's memory of a tensor, as boxes of the global tensor.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <tessera/checkpoint/box.h>

namespace tessera::checkpoint {

/// A box of a tensor and this rank's memory of it.
struct Piece {
  Box box;
  at::Tensor data; ///< of shape `box.sizes`, aliasing the tensor; plain, without autograd history
};

/// What this rank holds of `tensor`: all of a plain tensor, its part of a DTensor (nothing on a rank outside the mesh). Empty
/// boxes are left out. `name` is for errors: a placement that no boxes describe, a meta tensor.
std::vector<Piece> pieces_of(const std::string& name, const at::Tensor& tensor);

/// True for a row-major tensor on the CPU whose memory holds its values as they are.
bool is_plain_memory(const at::Tensor& tensor);

/// The part of a plain tensor that lies in `box`, aliasing it.
at::Tensor narrow(const at::Tensor& tensor, const Box& box);

/// How the tensor lies on its mesh, for people: "plain", or "(Shard(0)) on [4]".
std::string layout_of(const at::Tensor& tensor);

/// Tells autograd (and whoever compares versions) that the memory of `tensor`, and of a DTensor's local tensor, was written.
void mark_written(const at::Tensor& tensor);

} // namespace tessera::checkpoint
