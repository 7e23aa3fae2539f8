#pragma once

#include <ATen/core/ivalue.h>
#include <absl/container/inlined_vector.h>
#include <absl/types/span.h>

#include <cstdint>

#include <tessera/dtensor/calls/op_info.h>

namespace tessera::internal::dispatch {

/// What a plan depends on of the call itself: the operator, the spec of every tensor argument, the static arguments. The fallback
/// adds words for where it comes from and for the signs of its values.
using CallKey = absl::InlinedVector<uint64_t, 24>;

enum class KeyState {
  kComplete,
  kPlainTensor, ///< a plain tensor with dims is among the arguments: its spec has to be found first
  kUncacheable, ///< an argument that has no value to compare
};

/// Fills `key`. Allocates nothing for up to 24 words.
KeyState make_key(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, CallKey& key);

} // namespace tessera::internal::dispatch
