#pragma once

#include "call.h"

#include <memory>
#include <thread>

namespace tessera::python {

/// Completes the calls of a group whose end no thread of the program waits for: those with a Future or a timeout of their own,
/// and those that were dropped. In the order in which they come. Started at the first.
class CompletionThread {
 public:
  CompletionThread();
  /// Returns when all calls are over: their communicator is closed before, or lets them end.
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
