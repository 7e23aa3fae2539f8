#pragma once

// Operators with the shapes of their arguments, for tests that run them on all placements.

#include <functional>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing {

struct Op {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
  bool differentiable = true;
};
std::vector<Op> pointwise_ops();
std::vector<Op> reduction_ops();
std::vector<Op> matrix_ops();
std::vector<Op> shape_ops();
/// Attention with as many heads of keys as of queries, with groups of queries, and with one key for all; convolutions with and
/// without groups.
std::vector<Op> network_ops();

/// Distinct positive values, exact in every Partial of `lay_out`.
at::Tensor values(const std::vector<int64_t>& sizes, int64_t seed);

} // namespace tessera::testing
