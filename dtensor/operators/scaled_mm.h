#pragma once

// Internal: products of matrices in fp8.

#include <ATen/core/Tensor.h>

namespace tessera::internal {

/// aten::_scaled_mm of plain tensors.
struct ScaledProduct {
  at::Tensor a, b;                   ///< [m, k] and [k, n], fp8
  at::Tensor a_scale, b_scale;       ///< of one element each; or a row's each, [m, 1] and [1, n]
  at::Tensor bias = {};              ///< [n]
  at::Tensor result_scale = {};      ///< of a result in fp8
  at::ScalarType dtype = at::kFloat; ///< of the result
  bool fast_accumulation = false;
};

/// Whether `scale` has one number for all, or one for each of `rows` rows along `dim`.
bool is_whole_scale(at::IntArrayRef scale);
bool is_row_scale(at::IntArrayRef scale, size_t dim, int64_t rows);

/// (a · a_scale) (b · b_scale) + bias. It takes any shapes, strides and pairs of scales; the kernels of GPUs are given what they
/// want: sizes in multiples of 16, padded with zeros, and b in columns. Where a kernel lacks scales of rows for the result's
/// dtype, the product is computed in fp32 and then scaled.
at::Tensor scaled_mm(const ScaledProduct& product);
/// Does the same by the device's kernel alone, with what GPUs want of sizes and strides. The scales are both of a kind.
at::Tensor aligned_scaled_mm(ScaledProduct product);

} // namespace tessera::internal
