#pragma once

// Internal: writes through views of sharded parameters that were taken without grad mode (parameter_view.h).

#include <ATen/core/stack.h>

#include <tessera/reads/operator_traits.h>

namespace tessera::internal {

/// Runs an op that writes such views, the last of the stack, among DTensors and numbers where `is_among_dtensors`. On this rank's
/// part where that shares the parameter's memory, else on the whole in the dtype of the shard, of which each rank then keeps its
/// part. Every rank of the mesh calls it.
void run_on_written_views(const c10::OperatorHandle& op, const OperatorTraits& traits, torch::jit::Stack* stack,
                          bool is_among_dtensors);

} // namespace tessera::internal
