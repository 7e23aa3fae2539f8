#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

namespace tessera::internal {

// Two of LibTorch's keys that nothing else in a C++ program uses.

/// The key below autograd whose fallback runs an operator on the parts of DTensors.
inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::Fake;
/// The key above autograd, autocast and functorch whose fallback sees every operator that reads a tensor which has it: a sharded
/// parameter, its unsharded leaf, and the leaf's views (which copy the key set).
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::DeferredInit;

} // namespace tessera::internal
