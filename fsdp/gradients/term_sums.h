#pragma once

// Internal: gradients that are terms of sums over ranks of tensor parallelism.

#include <tessera/fsdp/gradients/group_gradients.h>

namespace tessera::internal {

/// Sums the terms among `ready` over the ranks of their meshes: one all-reduce for all of one mesh and dtype. Every one of these
/// ranks calls it with the same parameters.
void sum_terms(ReadyGradients& ready);

} // namespace tessera::internal
