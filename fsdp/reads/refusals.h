#pragma once

// Internal: what nothing may do to a sharded parameter.

#include <span>

#include <tessera/reads/operator_traits.h>

namespace tessera::internal {

class ParameterGroup;

/// The group of a leaf or of a view of one; an error once that is gone.
ParameterGroup& group_of_leaf(const at::Tensor& leaf);

/// An error where the operator would unshard a sharded parameter among the arguments, or change its shape, or write rows that
/// only this rank's batch reads.
void check_keeps_parameters(const c10::OperatorHandle& op, const OperatorTraits& traits, std::span<c10::IValue> arguments);

/// The error of a read from TorchScript that this thread optimizes.
[[noreturn]] void throw_read_by_optimized_script(const OperatorTraits& traits, std::span<c10::IValue> arguments);

} // namespace tessera::internal
