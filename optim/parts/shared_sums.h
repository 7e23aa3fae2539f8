#pragma once

// Internal: sums and extremes over a parameter that its ranks hold in parts.

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include <tessera/dtensor/tensor/pieces.h>

namespace tessera::internal {

/// What this rank gives to a reduction over one parameter.
struct ShareOfSums {
  at::Tensor parameter;
  at::Tensor values; ///< 1-D, of one dtype for all shares; as long on every rank
};

/// The reduction over the ranks that hold the other parts of the parameters, in the order of `shares`: one all-reduce for each
/// mesh dim that splits some of them. Those of plain and of replicated parameters stay as they are. Every rank of the meshes
/// calls it.
std::vector<at::Tensor> shared_reduction(const std::vector<ShareOfSums>& shares, ReduceOp op, std::string_view label);

inline std::vector<at::Tensor> shared_sums(const std::vector<ShareOfSums>& shares, std::string_view label) {
  return shared_reduction(shares, ReduceOp::kSum, label);
}

/// This rank's part of a plain tensor or DTensor, aliasing it: empty on a rank outside the mesh.
at::Tensor part_of(const at::Tensor& tensor);

/// The boxes of this rank's part of `like`, over `part`, which has its elements in the same places. Those of a plain tensor are
/// one. `part` is contiguous.
std::vector<Piece> pieces_like(const at::Tensor& like, const at::Tensor& part);

} // namespace tessera::internal
