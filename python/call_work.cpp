#include "call_work.h"

#include <c10/util/Exception.h>
#include <tessera/collectives/ranks/job_environment.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "without_gil.h"

namespace tessera::python {

CallWork::CallWork(std::shared_ptr<Call> call, std::shared_ptr<CompletionThreads> threads, Description description)
    : Work(description.rank, description.type),
      call_(std::move(call)),
      threads_(std::move(threads)),
      description_(std::move(description)) {}

// Python's reference to it may be the last one to all that it holds: also to the threads, where the group is gone.
CallWork::~CallWork() {
  const WithoutGil no_gil;
  try {
    if (!call_->is_over()) complete_in_background(); // its copies are due all the same
  } catch (const std::exception&) {                  // no memory or no thread: then nobody gets the result
  }
  call_.reset();
  threads_.reset();
}

bool CallWork::isCompleted() {
  const WithoutGil no_gil;
  return call_->poll();
}

bool CallWork::isSuccess() const {
  const WithoutGil no_gil;
  return call_->is_over() && !call_->failure();
}

std::exception_ptr CallWork::exception() const {
  const WithoutGil no_gil;
  return call_->failure();
}

void CallWork::complete_in_background() {
  std::call_once(in_background_, [this] { threads_->add(call_); });
}

bool CallWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil no_gil;
  const auto limit = timeout > kNoTimeout ? timeout : description_.timeout;
  if (limit > kNoTimeout)
    wait_at_most(limit);
  else
    call_->complete();
  if (const auto failure = call_->failure()) std::rethrow_exception(failure);
  return true;
}

void CallWork::wait_at_most(std::chrono::milliseconds timeout) {
  if (call_->poll()) return;
  complete_in_background();
  if (!call_->wait_for_others(std::min<std::chrono::milliseconds>(timeout, internal::kLongestTimeout)))
    C10_THROW_ERROR(DistBackendError, c10::str(description_.text, ": timed out after ", timeout.count(),
                                               " ms, the timeout of this wait. The call itself goes on"));
}

c10::intrusive_ptr<c10::ivalue::Future> CallWork::getFuture() {
  const WithoutGil no_gil;
  auto future = call_->future();
  if (!call_->is_over()) complete_in_background();
  return future;
}

} // namespace tessera::python
