#pragma once

#include <memory>
#include <new>
#include <utility>

namespace tessera::internal {

/// How many forks lie between this process and the program's start. A child of `fork` has none of the threads behind its parent's
/// communicators, and shares their connections: what a communicator remembers at its construction tells it that it is a copy.
int fork_depth() noexcept;

/// Keeps for ever what belongs to the parent, in a child whose copy must not be destroyed.
void leave_to_parent(const void* object);
/// The same for what `shared` points to: this reference to it stays for ever.
template <typename T>
void leave_to_parent(std::shared_ptr<T> shared) {
  const void* const reference = new (std::nothrow) std::shared_ptr<T>(std::move(shared));
  leave_to_parent(reference);
}

} // namespace tessera::internal
