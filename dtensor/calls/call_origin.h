#pragma once

// Internal: where the call of an operator comes from, as far as autograd tells. (A decomposition is a part of what made the call
// of the whole operator: call_site.h has its scope.)

#include <ATen/core/grad_mode.h>

#include <cstdint>

#include <tessera/dtensor/tensor/in_backward.h>

namespace tessera::internal {

/// Hooks of a node count as what is named for them. Those of a backward that a node calls count as the node
/// (docs/limits.md).
enum class CallOrigin : uint8_t {
  kProgram,       ///< no backward runs on this thread
  kSecondRun,     ///< a function of `recompute` runs again in a backward, for what it saved
  kFunction,      ///< the backward of a torch::autograd::Function, or a hook of its node
  kFormula,       ///< a derivative formula of PyTorch's own
  kWrittenView,   ///< the node of a view that was written (CopySlices), which runs the formula of what wrote it
  kBesideFormula, ///< a hook of a node with a formula, or autograd's sum of the gradients that it gave
  kHook,          ///< a hook of any other node, or a node of a program's own class
};

/// The origin of the calls that this thread makes in a backward.
CallOrigin origin_in_backward();

/// The origin of the calls that this thread makes now. It asks autograd in a backward: a caller keeps it for its call.
inline CallOrigin call_origin() { return in_backward() ? origin_in_backward() : CallOrigin::kProgram; }

/// Whether calls of this origin are those of a forward, and of no derivative: a program may run one in a backward, in grad mode.
/// In that mode a formula runs with `create_graph` alone, which keeps the graph.
bool is_forward(CallOrigin origin);

/// Whether it is that of a hook, or of autograd's sums of gradients.
inline bool is_beside_nodes(CallOrigin origin) { return origin == CallOrigin::kBesideFormula || origin == CallOrigin::kHook; }

} // namespace tessera::internal

namespace tessera::internal::dispatch {

/// In the backward of a torch::autograd::Function, where grad mode is off and what is saved is read as in its forward.
inline bool in_custom_backward() { return call_origin() == CallOrigin::kFunction; }

/// In a backward, and a program runs a forward there, in that of a function or node of its own or in a hook.
inline bool in_nested_forward() { return in_backward() && at::GradMode::is_enabled() && is_forward(origin_in_backward()); }

} // namespace tessera::internal::dispatch
