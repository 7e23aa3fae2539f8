#pragma once

// Internal: the tokens of a layer's input, as this rank takes them to the experts.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/moe.h>

namespace tessera::internal::experts {

/// `x` [..., width] is plain, or parts of sequences that are split over cp, of which this rank takes its own; or the activations
/// of tensor parallelism, which its ranks have together: each takes a part.
class TokenRows {
 public:
  /// `tensor_parallel` may be undefined. Every rank of it calls this.
  TokenRows(const at::Tensor& x, RouterImpl& router, const DeviceMesh& tensor_parallel);

  const at::Tensor& rows() const { return rows_; }     ///< [tokens, width], plain
  const at::Tensor& logits() const { return logits_; } ///< [tokens, experts], plain
  /// The sequences of the tokens. An error where x has no such dim.
  TokenSequences sequences() const;
  /// Rows [tokens, width] as `x` was. Every rank of `tensor_parallel` calls it.
  at::Tensor shaped(const at::Tensor& rows) const;

 private:
  void take_parts(const at::Tensor& x, RouterImpl& router);

  std::vector<int64_t> sizes_; ///< of x
  bool is_plain_ = true;       ///< x
  at::Tensor split_;           ///< x as a DTensor of which this rank has some tokens; undefined for a plain one
  bool is_flat_ = false;       ///< all dims of `split_` but the last are one
  at::Tensor rows_, logits_;
};

} // namespace tessera::internal::experts
