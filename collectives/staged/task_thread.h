#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera::internal {

/// Runs tasks one after another. Its end waits for all that were given to it. Tasks must not throw.
class TaskThread {
 public:
  TaskThread() : thread_([this] { work(); }) {}
  ~TaskThread() {
    run(nullptr);
    thread_.join();
  }
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  void run(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [&] { return !tasks_.empty(); });
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_; // after what it uses
};

} // namespace tessera::internal
