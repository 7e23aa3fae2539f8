#pragma once

#include <ATen/core/stack.h>
#include <absl/container/inlined_vector.h>
#include <absl/types/span.h>

#include <cstdint>

#include <tessera/dtensor/dispatch/op_info.h>

namespace tessera::internal::dispatch {

/// Everything that a plan depends on: the operator, the spec of every tensor argument, the static arguments.
using CallKey = absl::InlinedVector<uint64_t, 24>;

enum class KeyState {
  kComplete,
  kPlainTensor, ///< a plain tensor with dims is among the arguments: its spec has to be found first
  kUncacheable, ///< an argument that has no value to compare
};

/// Fills `key` for the call at the end of `stack`. Allocates nothing for up to 24 words.
KeyState make_key(const OpInfo& info, const torch::jit::Stack& stack, size_t begin, CallKey& key);

} // namespace tessera::internal::dispatch
