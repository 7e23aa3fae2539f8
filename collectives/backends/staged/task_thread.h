#pragma once

#include <tessera/base/forks.h>

#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera::internal {

/// Runs tasks one after another. Its end waits for all that were given to it. Tasks must not throw. In a forked child, which has
/// no such thread, a task is an error, and the end waits for nothing.
class TaskThread {
 public:
  TaskThread() {
    state_->thread = std::thread([this] { work(); });
  }
  ~TaskThread() {
    if (is_forked_copy()) {
      leave_to_parent(state_.release());
    } else {
      run(nullptr);
      state_->thread.join();
    }
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void run(std::function<void()> task) {
    TORCH_CHECK(!is_forked_copy(), "this process was forked from a rank and has no part in its groups");
    {
      const std::lock_guard lock(state_->mutex);
      state_->tasks.push_back(std::move(task));
    }
    state_->ready.notify_one();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable ready;
    std::deque<std::function<void()>> tasks;
    std::thread thread;
  };

  bool is_forked_copy() const { return fork_depth() != fork_depth_; }

  void work() {
    auto& state = *state_;
    while (true) {
      std::unique_lock lock(state.mutex);
      state.ready.wait(lock, [&] { return !state.tasks.empty(); });
      const auto task = std::move(state.tasks.front());
      state.tasks.pop_front();
      lock.unlock();
      if (!task) return;
      task();
    }
  }

  const int fork_depth_ = fork_depth();
  std::unique_ptr<State> state_ = std::make_unique<State>();
};

} // namespace tessera::internal
