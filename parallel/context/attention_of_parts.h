#pragma once

// Internal: scaled_dot_product_attention for devices that choose its kernel by themselves.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>

namespace tessera::internal {

/// Takes a call of scaled_dot_product_attention from the stack and leaves its result, where its tensors are parts of sequences
/// that are split over ranks; returns whether they are. Otherwise the call stays, with the key heads that belong to this rank's
/// query heads in place of all.
bool run_attention_of_parts(torch::jit::Stack& stack);

/// Runs the other calls whose tensors are on the meta device, plain or parts of it; null: the composite kernel.
using AttentionKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
inline std::atomic<AttentionKernel> attention_on_meta = nullptr;

} // namespace tessera::internal
