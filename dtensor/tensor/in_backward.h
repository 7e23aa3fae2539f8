#pragma once

// Internal: whether a backward runs on this thread, the caller's own on the CPU.

#include <torch/csrc/autograd/graph_task.h>

namespace tessera::internal {

/// Whether autograd runs a backward on this thread, whatever calls there.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

} // namespace tessera::internal
