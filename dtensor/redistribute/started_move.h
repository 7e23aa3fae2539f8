#pragma once

// Internal: a move of a DTensor's data that runs beside what its rank computes.

#include <ATen/core/Tensor.h>

#include <string_view>

#include <tessera/dtensor/spec.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal {

/// What `move` gives, later: the last collective has started, and has the values that the tensor has now. Outside autograd. Every
/// rank of the mesh makes one; all call `finish`, or none looks at the result.
class StartedMove {
 public:
  StartedMove(const at::Tensor& tensor, const Placements& placements, std::string_view label);
  /// Waits for the collective, and gives a new DTensor. It is called once.
  at::Tensor finish();

 private:
  at::Tensor source_; ///< its local tensor
  SpecPtr target_;
  redistribute::Deferred deferred_;
  at::Tensor unfinished_;
};

/// `result`, which has the values of `source` under other placements already, as what a redistribution gave: in autograd's graph
/// where `source` has a gradient to come.
at::Tensor moved_in_graph(const at::Tensor& source, const at::Tensor& result);

} // namespace tessera::internal
