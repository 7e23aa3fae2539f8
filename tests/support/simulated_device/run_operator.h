#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::testing::sim {

/// The kernel of every operator that has none of its own on the device. It returns outputs that are not computed yet; the current
/// stream runs the CPU's kernel on their memory later.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The same for an operator on lists (`_foreach_…`), as one launch. Where some of the tensors are elsewhere, one launch a tensor.
void run_foreach_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace tessera::testing::sim
