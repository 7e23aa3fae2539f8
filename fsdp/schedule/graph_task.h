#pragma once

// Internal: what a schedule asks autograd of the graph task that runs now, and one of its own.

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>

#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

/// The graph task of a backward.
struct FollowedGraphTask {
  std::weak_ptr<void> mark; ///< which it owns: expired once it is gone
  int id = -1;
};

/// Runs a backward of nothing, in which `event` happens.
void run_empty_backward(const std::function<void()>& event);

/// Whether it is to run `node`, or has.
bool is_in_graph_task(torch::autograd::Node* node);

/// A read by the forward of a model that takes no part in it: a tensor hook of another model trains it.
bool is_forward_in_hook(const ParameterGroup& group);

/// Whether it brings a gradient of each leaf of the parameter, the plain one and that of ops on DTensors. Hooks are the program's
/// own, and see their sum.
bool is_read_in_both_ways(const ShardedParameter& parameter);

} // namespace tessera::internal
