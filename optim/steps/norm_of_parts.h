#pragma once

// Internal: the norm of what one rank has.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cmath>
#include <vector>

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// How the norms of parts become one: by a sum of powers, or as the greatest or smallest.
struct NormOf {
  bool is_extreme() const { return std::isinf(type); }
  ReduceOp op() const { return !is_extreme() ? ReduceOp::kSum : type > 0 ? ReduceOp::kMax : ReduceOp::kMin; }
  double type;
};

/// One of several, on the device of the first.
at::Tensor joined(std::vector<at::Tensor> values, NormOf norm);

/// The sum of the parts' norms to the power of the norm, each times its weight; or the extreme of the norms. A double, in which
/// no square of a float overflows. It is computed where the parts are, some of which may be on the host, and lies on `device`.
at::Tensor norm_of_parts(const std::vector<at::Tensor>& parts, const std::vector<double>& weights, NormOf norm,
                         c10::Device device);

} // namespace tessera::internal
