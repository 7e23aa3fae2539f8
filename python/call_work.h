#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "call.h"
#include "completion_threads.h"

namespace tessera::python {

/// c10d's handle of a call. The thread that waits for it moves it on.
class CallWork final : public c10d::Work {
 public:
  struct Description {
    c10d::OpType type;
    std::string text; ///< for errors: ALLREDUCE of group 0 [0, 1] on rank 1
    int rank = 0;
    uint64_t sequence = 0;
    std::chrono::milliseconds timeout = kNoTimeout; ///< of this call, where it is shorter than the communicator's
  };

  CallWork(std::shared_ptr<Call> call, std::shared_ptr<CompletionThreads> threads, Description description);
  ~CallWork() override;
  CallWork(const CallWork&) = delete;
  CallWork& operator=(const CallWork&) = delete;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return call_->outputs(); }
  /// Throws why there is no result: after the communicator's timeout, or after `timeout` where that is shorter.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return description_.sequence; }

 private:
  void complete_in_background();
  void wait_at_most(std::chrono::milliseconds timeout);

  std::shared_ptr<Call> call_;
  std::shared_ptr<CompletionThreads> threads_;
  Description description_;
  std::once_flag in_background_;
};

} // namespace tessera::python
