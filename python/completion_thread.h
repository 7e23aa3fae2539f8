#pragma once

#include "call.h"

#include <memory>
#include <thread>

namespace tessera::python {

/// Completes those calls of a group whose end no thread of the program waits for: with a Future or a timeout of their own, and
/// dropped ones. In the order in which they come, so that one that waits keeps back those behind it. Started at the first.
class CompletionThread {
 public:
  CompletionThread();
  /// Returns when all calls are over: their communicator is closed before, or lets them end. At once on such a thread.
  ~CompletionThread();
  CompletionThread(const CompletionThread&) = delete;
  CompletionThread& operator=(const CompletionThread&) = delete;

  /// Nothing in a forked child: the call is its parent's.
  void add(std::shared_ptr<Call> call);

 private:
  struct Queue;

  const int fork_depth_;
  std::shared_ptr<Queue> queue_; ///< shared with the thread
};

} // namespace tessera::python
