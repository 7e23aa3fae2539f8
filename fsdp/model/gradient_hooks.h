#pragma once

// Internal: autograd's way from the leaves of a group to its schedule.

#include <ATen/core/Tensor.h>

#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

/// Makes the gradients of the group's leaves land in its schedule as soon as autograd has accumulated them, and sends there as
/// well those that reach the parameters themselves (as arguments of a torch::autograd::Function): a parameter and its leaf share
/// one node. Nothing for a group that has no leaves yet, or was given here before.
void redirect_gradients(ParameterGroup& group);

/// Makes each gradient that a graph from before brings to a parameter of `group` an error: the group gives way to another.
void retire_gradients(ParameterGroup& group);

/// What stands for the parameter in an op that mixes it with other DTensors in grad mode: their gradients are DTensors, and need
/// no reduction.
at::Tensor make_dtensor_leaf(const at::Tensor& parameter, const std::weak_ptr<ParameterGroup>& group, size_t index);

} // namespace tessera::internal
