#pragma once

// Internal: products beside the collectives that bring their rows, or take their sums away.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera::internal::parallel {

/// The positions of a sequence, dim `dim` of an activation, in equal parts over the ranks of a 1-D mesh as under Shard, and in
/// chunks: each has as many positions of every rank, of which those that a short part lacks are zeros.
class SequenceChunks {
 public:
  /// It makes at most `most` chunks, and none without a position.
  SequenceChunks(DeviceMesh mesh, int64_t dim, int64_t positions, int64_t most);

  const DeviceMesh& mesh() const { return mesh_; }
  int64_t dim() const { return dim_; }
  int64_t positions() const { return positions_; }
  int64_t ranks() const { return mesh_.size(); }
  int64_t count() const { return count_; }
  int64_t rank() const { return mesh_.local_rank(); }
  /// The positions of `rank`.
  Extent part(int64_t rank) const { return chunk_extent(positions_, ranks(), rank); }
  /// Positions of each rank in the chunk.
  int64_t length(int64_t chunk) const { return chunk_extent(part(0).size, count_, chunk).size; }
  /// The positions of `rank` in the chunk, counted in its part: fewer than `length`, or none, at the end of a short part.
  Extent piece(int64_t rank, int64_t chunk) const;

 private:
  DeviceMesh mesh_;
  int64_t dim_, positions_, count_;
};

struct GatheredProduct {
  at::Tensor whole, product;
};

/// The whole of an activation of which this rank has `part`, and its product with `weight` [in, out]. All chunks are asked for
/// at once, and what has come is multiplied while others are on their way, this rank's part first. Every rank of the mesh calls
/// it; all tensors are local ones. Outside autograd.
GatheredProduct gather_product(const at::Tensor& part, const at::Tensor& weight, const SequenceChunks& chunks,
                               const std::string& label);

/// This rank's part of the sum over the ranks of `whole` · `weight` [in, out]. A chunk is reduced while the next one is
/// multiplied.
at::Tensor scatter_product(const at::Tensor& whole, const at::Tensor& weight, const SequenceChunks& chunks,
                           const std::string& label);

} // namespace tessera::internal::parallel
