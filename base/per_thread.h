#pragma once

// Internal: what a thread has of its own: scopes that it is in, and caches.

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

namespace tessera::internal {

/// The values that one thread has of all `PerThread`s, by their places; null: not made yet.
struct ThreadTable {
  static constexpr size_t kPlaces = 64;
  std::array<void*, kPlaces> values; ///< the first is nobody's, and stays null
  bool has_ended;                    ///< the thread is ending, and has destroyed its values
};
extern constinit thread_local ThreadTable thread_table;

using ThreadValue = std::unique_ptr<void, void (*)(void*)>;
/// Makes this thread's value of a PerThread, whose place is given out where it is 0.
void* make_thread_value(std::atomic<size_t>& place, ThreadValue (*make)());

/// A value that each thread has of its own: `T()` where the thread first asks, destroyed when it ends. For globals and static
/// members alone: each takes one of the places of `ThreadTable` for the life of the process. May be asked before main, and by
/// what a thread destroys as it ends: that gets a new value, which is never destroyed. A look costs a few loads, and no lock.
///
/// State of a thread is seen by nothing that runs elsewhere: autograd runs the backward of a device's operators on a thread of
/// its own. What must hold there goes by LibTorch's debug information (dtensor/tensor/program_scopes.h), or by an argument.
template <typename T>
class PerThread {
 public:
  constexpr PerThread() = default;
  PerThread(const PerThread&) = delete;
  PerThread& operator=(const PerThread&) = delete;
  ~PerThread() = default;

  T& operator*() const {
    void* const found = thread_table.values[place_.load(std::memory_order_relaxed)];
    return *static_cast<T*>(__builtin_expect(found != nullptr, 1) ? found : make_thread_value(place_, &make));
  }
  T* operator->() const { return &**this; }

 private:
  static ThreadValue make() {
    return {new T(), [](void* value) { delete static_cast<T*>(value); }};
  }

  mutable std::atomic<size_t> place_ = 0; ///< 0: none is given out yet
};

/// While it lives, `place` has another value. For what a thread has of its own, which it gives back on that thread.
template <typename T>
class ScopedValue {
 public:
  ScopedValue(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~ScopedValue() { place_ = std::move(before_); }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

  const T& before() const { return before_; }

 private:
  T& place_;
  T before_;
};

} // namespace tessera::internal
