#pragma once

// Internal: passes over many tensors on the CPU, for which ATen's list operators take a call of an operator each.

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::internal {

/// Whether the functions below take a tensor: one on the CPU, of a real floating-point dtype, whose elements fill its memory.
bool is_flat(const at::Tensor& tensor);

/// The sum of the squares of each tensor's elements times the tensor's weight. It is added up in double, in an order that does
/// not depend on the number of threads.
double weighted_squares(const std::vector<at::Tensor>& tensors, const std::vector<double>& weights);

/// Multiplies the tensors, of float or double, in place, and counts the writes.
void multiply_flat(const std::vector<at::Tensor>& tensors, double factor);

} // namespace tessera::internal
