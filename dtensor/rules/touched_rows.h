#pragma once

// Internal: for kernels that reduce dims of a part that may end inside a row.

#include <ATen/core/Tensor.h>

#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::rules {

/// The rows of dim 0 that this rank's part touches, where a RaggedShard takes dims 0..d as one.
class TouchedRows {
 public:
  explicit TouchedRows(const Spec& spec);

  /// These rows, in all dims of the tensor: `local`, and `fill` for what other ranks hold of them.
  at::Tensor completed(const at::Tensor& local, const at::Scalar& fill) const;

  /// This rank's part of `output` from `reduced`, the reduction of these rows. Where that is a Partial of all rows, `fill` is in
  /// the others.
  at::Tensor result(const at::Tensor& reduced, const OutputPlan& output, const at::Scalar& fill) const;

 private:
  const Spec& spec_;
  int64_t merged_;                             ///< d
  int64_t part_;                               ///< positions that this rank holds
  int64_t first_ = 0, count_ = 0, before_ = 0; ///< `before_`: positions of these rows that lie before the part
};

} // namespace tessera::internal::rules
