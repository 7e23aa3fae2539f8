#pragma once

// Internal: objects that lie all over the memory, as the handles of a model's parameters do after a step has gone over them.

#include <cstddef>

namespace tessera::internal {

/// Has the memory fetch the object, which is read soon; null is fine.
template <typename T>
void prefetch(const T* object) {
  if (!object) return;
  constexpr size_t kCacheLine = 64;
  const auto* bytes = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kCacheLine) __builtin_prefetch(bytes + offset);
}

} // namespace tessera::internal
