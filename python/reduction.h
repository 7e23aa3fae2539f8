#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <tessera/collectives/communicator.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <optional>
#include <string_view>

#include "staging.h"

namespace tessera::python {

/// One of c10d's reductions over the ranks of a communicator, built of what that has. SUM, AVG, PRODUCT, MIN, MAX, and
/// PREMUL_SUM, which scales a copy; complex numbers are added as pairs of real ones. For BAND, BOR and BXOR each rank receives
/// the others' inputs, and combines them itself.
class Reduction {
 public:
  /// An error for other kinds.
  explicit Reduction(const c10d::ReduceOp& op);

  /// `tensor` becomes its reduction over the ranks. A dtype that the reduction is not defined for is an error before anything is
  /// sent.
  Work all_reduce(Communicator& group, Staging& staging, const at::Tensor& tensor, std::string_view label) const;
  /// `output` [n] receives that of the part of `input` [size × n] with this rank's number. `input` keeps its values. The same
  /// errors.
  Work reduce_scatter(Communicator& group, Staging& staging, const at::Tensor& output, const at::Tensor& input,
                      std::string_view label) const;

  /// An error for a dtype that the reduction is not defined for. The communicator checks its own reductions.
  void check_dtype(const at::Tensor& tensor) const;

 private:
  using Combine = at::Tensor& (at::Tensor::*)(const at::Tensor&) const;

  at::Tensor as_real(const at::Tensor& tensor) const;
  void combine(Staging& staging, const at::Tensor& output, const at::Tensor& parts) const;

  ReduceOp op_ = ReduceOp::kSum;
  bool adds_ = false;
  std::optional<at::Scalar> factor_; ///< of the inputs
  Combine combine_ = nullptr;        ///< in place of `op_`, where the communicator has none
};

} // namespace tessera::python
