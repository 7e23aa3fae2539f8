#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <string_view>

namespace tessera::internal {

/// The floating-point operations (a product and its sum are two) of one call of a matrix product, a convolution or attention,
/// with their backwards; 0 for any other operator, and for one on DTensors, of which the kernel on the parts counts. `name` is as
/// in "aten::mm".
double flops_of(std::string_view name, c10::ArrayRef<c10::IValue> arguments);
/// Whether that is a kernel of attention.
bool is_attention(std::string_view name);
/// Whether that is a product in fp8.
bool is_float8(std::string_view name);

} // namespace tessera::internal
