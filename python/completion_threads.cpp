#include "completion_threads.h"

#include <tessera/base/forks.h>
#include <tessera/base/per_thread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "without_gil.h"

namespace tessera::python {

namespace {

/// Who makes the calls of this thread: 0 on a program's thread, and on a completion thread the callbacks of the call that it is
/// completing, by a number that no other call in the process has.
constinit internal::PerThread<uint64_t> caller_here;
std::atomic<uint64_t> completed_calls = 0;

} // namespace

/// The calls of one caller, with the thread that completes them. Another caller takes it over only when it is idle: calls that a
/// callback waits for may not stand behind those of others, whose callbacks may wait for this one.
struct CompletionThreads::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Call>> calls;
  bool is_busy = false; ///< with the call that it has taken
  bool closed = false;
  uint64_t caller = 0; ///< guarded by the mutex of the CompletionThreads
  std::thread thread;

  bool is_idle() {
    const std::lock_guard lock(mutex);
    return !is_busy && calls.empty();
  }

  void push(std::shared_ptr<Call> call) {
    {
      const std::lock_guard lock(mutex);
      calls.push_back(std::move(call));
    }
    changed.notify_one();
  }

  void close() {
    {
      const std::lock_guard lock(mutex);
      closed = true;
    }
    changed.notify_one();
  }

  // Null: there will be no more.
  std::shared_ptr<Call> next() {
    std::unique_lock lock(mutex);
    is_busy = false;
    changed.wait(lock, [this] { return closed || !calls.empty(); });
    if (calls.empty()) return nullptr;
    auto call = std::move(calls.front());
    calls.pop_front();
    is_busy = true;
    return call;
  }

  void complete_all() {
    while (const auto call = next()) {
      *caller_here = ++completed_calls;
      call->complete();
    }
  }
};

CompletionThreads::CompletionThreads() : fork_depth_(internal::fork_depth()) {}

CompletionThreads::~CompletionThreads() {
  if (fork_depth_ != internal::fork_depth()) { // the threads are the parent's
    for (auto& queue : queues_) internal::leave_to_parent(std::move(queue));
    return;
  }
  const WithoutGil no_gil;
  for (const auto& queue : queues_) queue->close();
  for (const auto& queue : queues_) {
    // What a Future calls back may hold the group's last reference, and another of its threads may wait for a message yet.
    if (*caller_here > 0)
      queue->thread.detach();
    else
      queue->thread.join();
  }
}

void CompletionThreads::add(std::shared_ptr<Call> call) {
  if (fork_depth_ != internal::fork_depth()) return;
  const std::lock_guard lock(mutex_);
  queue_of(*caller_here).push(std::move(call));
}

CompletionThreads::Queue& CompletionThreads::queue_of(uint64_t caller) {
  const auto own = std::ranges::find(queues_, caller, [](const auto& queue) { return queue->caller; });
  if (own != queues_.end()) return **own;
  const auto idle = std::ranges::find_if(queues_, [](const auto& queue) { return queue->is_idle(); });
  auto& queue = idle != queues_.end() ? **idle : start_queue();
  queue.caller = caller;
  return queue;
}

CompletionThreads::Queue& CompletionThreads::start_queue() {
  const auto queue = std::make_shared<Queue>();
  queues_.reserve(queues_.size() + 1); // nothing may fail once the thread runs
  queue->thread = std::thread([queue] { queue->complete_all(); });
  queues_.push_back(queue);
  return *queue;
}

} // namespace tessera::python
