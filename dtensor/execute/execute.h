#pragma once

// Internal: runs a call by its plan.

#include <ATen/core/stack.h>

#include <tessera/dtensor/plan/plan.h>

namespace tessera::internal::dispatch {

/// `whole`, which is broadcast as `stretch` says, on its part of the leading dims.
at::Tensor stretched(const at::Tensor& whole, const Stretch& stretch);

/// Runs the call at the end of `stack` on the local tensors, and puts its results in their place.
void execute(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, torch::jit::Stack* stack);

} // namespace tessera::internal::dispatch
