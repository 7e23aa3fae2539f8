#include "completion_thread.h"

#include <tessera/collectives/forks.h>

#include <deque>
#include <utility>

namespace tessera::python {

namespace {

thread_local bool is_completion_thread = false;

} // namespace

struct CompletionThread::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Call>> calls;
  bool closed = false;
  std::thread thread;

  // Null: there will be no more.
  std::shared_ptr<Call> next() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return closed || !calls.empty(); });
    if (calls.empty()) return nullptr;
    auto call = std::move(calls.front());
    calls.pop_front();
    return call;
  }
};

CompletionThread::CompletionThread() : fork_depth_(internal::fork_depth()), queue_(std::make_shared<Queue>()) {}

CompletionThread::~CompletionThread() {
  if (fork_depth_ != internal::fork_depth()) { // the thread is the parent's
    internal::leave_to_parent(new (std::nothrow) std::shared_ptr<Queue>(std::move(queue_)));
    return;
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->changed.notify_all();
  if (!queue_->thread.joinable()) return;
  // What a Future calls back may hold the group's last reference, and another of its threads may wait for a message yet.
  if (is_completion_thread)
    queue_->thread.detach();
  else
    queue_->thread.join();
}

void CompletionThread::add(std::shared_ptr<Call> call) {
  if (fork_depth_ != internal::fork_depth()) return;
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->calls.push_back(std::move(call));
    if (!queue_->thread.joinable())
      queue_->thread = std::thread([queue = queue_] {
        is_completion_thread = true;
        while (const auto each = queue->next()) each->complete();
      });
  }
  queue_->changed.notify_one();
}

} // namespace tessera::python
