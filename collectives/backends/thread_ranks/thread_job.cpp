#include <tessera/collectives/backends/thread_ranks/thread_job.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

ThreadJob::ThreadJob(int ranks, const ProcessGroupOptions& options)
    : timeout_(options.timeout), ranks_(static_cast<size_t>(ranks)) {}

void ThreadJob::end(int64_t rank, std::optional<std::string> failure) {
  const std::lock_guard lock(mutex_);
  auto& ended = ranks_[static_cast<size_t>(rank)];
  ended.has_ended = true;
  if (failure) {
    ended.failure = std::move(*failure);
    if (!first_to_fail_) first_to_fail_ = rank;
  }
  notify();
}

std::optional<ThreadJob::Failure> ThreadJob::first_failure() const {
  const std::lock_guard lock(mutex_);
  if (!first_to_fail_) return std::nullopt;
  return Failure{*first_to_fail_, ranks_[static_cast<size_t>(*first_to_fail_)].failure};
}

std::string ThreadJob::describe(int64_t rank) const {
  const auto& one = ranks_[static_cast<size_t>(rank)];
  if (one.has_ended) return c10::str("rank ", rank, one.failure.empty() ? " has returned" : " has thrown: " + one.failure);
  return c10::str("rank ", rank, one.waits_in.empty() ? ", which is in no collective" : ", which waits in " + one.waits_in);
}

/// Names the one to blame, if one of them has ended. Others may have failed because of the first that did.
std::optional<std::string> ThreadJob::blame(const std::vector<int64_t>& absent) const {
  const auto has_ended = [&](int64_t rank) { return ranks_[static_cast<size_t>(rank)].has_ended; };
  const auto ended = std::find_if(absent.begin(), absent.end(), has_ended);
  if (ended == absent.end()) return std::nullopt;
  const bool has_failed = !ranks_[static_cast<size_t>(*ended)].failure.empty();
  return describe(has_failed ? *first_to_fail_ : *ended);
}

void ThreadJob::wait(int64_t rank, const std::string& text, const std::function<bool()>& is_done,
                     const std::function<std::vector<int64_t>()>& absent) {
  std::unique_lock lock(mutex_);
  auto& waits_in = ranks_[static_cast<size_t>(rank)].waits_in;
  const auto outer = std::exchange(waits_in, text);
  std::optional<std::string> ended;
  const auto is_over = [&] { return is_done() || (ended = blame(absent())).has_value(); };
  const bool in_time = changed_.wait_for(lock, timeout_, is_over);
  waits_in = outer;
  if (ended) C10_THROW_ERROR(DistNetworkError, c10::str(text, ": ", *ended));
  if (in_time) return;
  std::string missing;
  for (const auto other : absent()) missing += c10::str(missing.empty() ? "" : "; ", describe(other));
  C10_THROW_ERROR(DistNetworkError, c10::str(text, ": timed out after ", timeout_.count(), " ms, waiting for ", missing));
}

} // namespace tessera::internal
