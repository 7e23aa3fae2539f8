#pragma once

// What random programs are made of, by the number of arguments. Dims are drawn, and fit the first argument.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace tessera::testing {

struct UnaryOp {
  const char* name;
  at::Tensor (*run)(const at::Tensor&);
};
c10::ArrayRef<UnaryOp> unary_ops();

/// Of operands that broadcast.
struct BinaryOp {
  const char* name;
  at::Tensor (*run)(const at::Tensor&, const at::Tensor&);
};
c10::ArrayRef<BinaryOp> binary_ops();

/// Along a dim.
struct DimOp {
  const char* name;
  at::Tensor (*run)(const at::Tensor&, int64_t dim, bool keep);
};
c10::ArrayRef<DimOp> ops_along_a_dim();

/// Writes into the first argument; the second has its shape, or broadcasts to it.
struct WritingOp {
  const char* name;
  void (*run)(const at::Tensor&, const at::Tensor&);
};
c10::ArrayRef<WritingOp> writing_ops();

} // namespace tessera::testing
