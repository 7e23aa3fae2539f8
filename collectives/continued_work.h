#pragma once

#include <tessera/collectives/work.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace tessera {

/// A `Work` whose wait waits for `first` and then calls `rest`, once, on the thread that waits; on a device with its current
/// stream. It is complete when `rest` has returned. An error of either is thrown by each wait.
inline Work then(Work first, std::function<void()> rest) {
  struct State final : WorkState {
    State(Work w, std::function<void()> f) : first(std::move(w)), rest(std::move(f)) {}
    void wait() override {
      const std::lock_guard lock(mutex);
      if (error) std::rethrow_exception(error);
      if (!rest) return;
      try {
        Work(first).wait(); // a copy: others ask whether it blocks
        std::exchange(rest, nullptr)();
        is_done = true;
      } catch (...) {
        error = std::current_exception();
        rest = nullptr;
        is_done = true;
        throw;
      }
    }
    bool is_completed() override { return is_done; }
    bool blocks_host() const override { return first.blocks_host(); }

    std::mutex mutex; // of those who wait
    std::atomic<bool> is_done = false;
    const Work first;
    std::function<void()> rest;
    std::exception_ptr error;
  };
  return Work(std::make_shared<State>(std::move(first), std::move(rest)));
}

} // namespace tessera
