#pragma once

// Internal: a rank's part of a tensor as boxes of the global one.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/dtensor/layout/box.h>
#include <tessera/dtensor/spec.h>

namespace tessera::internal {

/// A box of a tensor and a rank's memory of it.
struct Piece {
  Box box;
  at::Tensor data; ///< of shape `box.sizes`, aliasing the part; plain, without autograd history
};

/// What `local` holds, the part of a tensor of `spec` that the rank at `coordinate` of the mesh has: its boxes without empty
/// ones. An error for Partial. Under a RaggedShard `local` is contiguous.
std::vector<Piece> pieces_of_part(const at::Tensor& local, const Spec& spec, const std::vector<int64_t>& coordinate);

/// The part of a plain tensor that lies in `box`, aliasing it.
at::Tensor narrow(const at::Tensor& tensor, const Box& box);

} // namespace tessera::internal
