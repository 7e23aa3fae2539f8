#pragma once

// Internal: numbers in codes of fp8, as the products of float8_linear take them.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/dtensor/spec.h>
#include <tessera/nn/float8_scaling.h>

namespace tessera::internal {

/// The largest sizes of `numbers` in fp32, of all or of those along `dim`, in a tensor of as many dims.
at::Tensor largest_in_float8(const at::Tensor& numbers, Float8Scaling scaling, int64_t dim);
/// The smallest powers of two with which numbers as large as these fit into `dtype`; NaN where they are not finite.
at::Tensor float8_scale(const at::Tensor& largest, at::ScalarType dtype);

struct Float8Codes {
  at::Tensor codes, scale;
};

/// `numbers` in `dtype`, with one scale [1, 1] of them all; or, with scales of rows, a matrix, of which `along` is the dim that
/// has none for itself. A quotient by a power of two is exact in bf16, which has the exponents of the scale, and takes half the
/// bytes there.
Float8Codes encode_float8(const at::Tensor& numbers, at::ScalarType dtype, Float8Scaling scaling, int64_t along);

/// [.., k] as a matrix [m, k].
at::Tensor as_matrix(const at::Tensor& tensor);

/// Says where a weight lies, of which a backward needs that alone; null for one that is no DTensor.
SpecPtr place_of(const at::Tensor& weight);

/// `numbers` [.., k], which a product takes beside a weight that lies at `weight`, in codes, as a matrix [m, k]. Where ranks have
/// parts of the weight and, under sequence parallelism, other parts of the numbers than those of dim k, each rank encodes its
/// own, and the codes are what is gathered, a byte an element. The last ones that were gathered in this thread serve whoever asks
/// for the same numbers next.
Float8Codes rows_in_float8(const at::Tensor& numbers, at::ScalarType dtype, Float8Scaling scaling, int64_t along,
                           const SpecPtr& weight);

/// Whether the gathers beside the weight are of codes, those of the product's gradient too: with one scale, which all ranks have.
bool gathers_float8(const at::Tensor& numbers, Float8Scaling scaling, const SpecPtr& weight);

} // namespace tessera::internal
