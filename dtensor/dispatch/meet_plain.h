#pragma once

// Internal: sharded parameters, and what is computed from them alone, beside plain tensors.

#include <tessera/dtensor/calls/op_info.h>

namespace tessera::internal::dispatch {

/// Runs the call at the end of `stack` on whole tensors where it mixes plain tensors with DTensors all of which have a
/// `whole_dtype`, or such DTensors of two devices; false where it does not, or writes a parameter, and so goes on as one of
/// DTensors. What it writes else becomes a plain tensor itself. Every rank of the mesh calls it.
bool run_on_whole(const c10::OperatorHandle& op, const OpInfo& info, torch::jit::Stack* stack);

/// What a forward hands out for `tensor`: the whole of one that was computed from sharded parameters alone, without a gradient to
/// come; any other as it is. Every rank of the mesh calls it.
at::Tensor whole_if_computed(const at::Tensor& tensor);

} // namespace tessera::internal::dispatch
