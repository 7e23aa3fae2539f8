#pragma once

// Internal: bitsandbytes' tables of 8-bit codes.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::internal {

/// The 256 values of the dynamic table, ascending: a sign (if `is_signed`), an exponent from 1e-6 to 1 in unary and a fraction in
/// the remaining bits; 0 and 1 are among them (bitsandbytes: create_dynamic_map).
std::vector<float> dynamic_table(bool is_signed);

/// The values of `codes` (uint8), relative to the largest of their blocks.
at::Tensor dequantized(const at::Tensor& codes, bool is_signed);

/// The codes (uint8) of the values that are nearest to `values`, from -1 or 0 to 1. The lower one of two that are equally near.
at::Tensor nearest_codes(const at::Tensor& values, bool is_signed);

} // namespace tessera::internal
