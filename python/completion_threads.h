#pragma once

#include "call.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::python {

/// Completes those calls of a group whose end no thread of the program waits for: with a Future or a timeout of their own, and
/// dropped ones. The program's own calls go to one thread, in the order in which they come, so that one that waits keeps back
/// those behind it.
///
/// A thread also runs what the Futures of its calls call back. Such a callback may wait for calls that it makes itself, on any
/// group: those of each callback go to another thread, in their order. A thread starts when a call needs it; one that has nothing
/// to do is used again.
class CompletionThreads {
 public:
  CompletionThreads();
  /// Returns when all calls are over: their communicator is closed before, or lets them end. At once on such a thread.
  ~CompletionThreads();
  CompletionThreads(const CompletionThreads&) = delete;
  CompletionThreads& operator=(const CompletionThreads&) = delete;

  /// Nothing in a forked child: the call is its parent's.
  void add(std::shared_ptr<Call> call);

 private:
  struct Queue;

  Queue& queue_of(uint64_t caller);
  Queue& start_queue();

  const int fork_depth_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Queue>> queues_; ///< guarded by `mutex_`; each is shared with its thread
};

} // namespace tessera::python
