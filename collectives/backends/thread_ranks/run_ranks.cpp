#include <tessera/collectives/run_ranks.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/backends/thread_ranks/thread_communicator.h>
#include <tessera/collectives/backends/thread_ranks/thread_job.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/start/rank_scope.h>

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {

namespace internal {

namespace {

/// `program` as one rank of the job.
void run_rank(ThreadJob& job, int rank, const std::function<std::unique_ptr<RankScope>()>& enter,
              const std::function<void()>& program) {
  std::optional<std::string> failure;
  try {
    const auto scope = enter();
    program();
  } catch (...) {
    failure = error_text(std::current_exception());
  }
  job.end(rank, std::move(failure));
}

/// Runs each rank in a thread of its own and waits for all. Where the system starts no more threads, the ranks without one count
/// as failed, so that the others do not wait for them, and this throws.
void run_all(ThreadJob& job, int ranks, const std::function<void(int rank)>& run) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(ranks));
  std::string refusal;
  try {
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  } catch (const std::exception& error) {
    refusal = c10::str("could not be started: ", error.what());
    for (int rank = static_cast<int>(threads.size()); rank < ranks; ++rank) job.end(rank, refusal);
  }
  for (auto& thread : threads) thread.join();
  TORCH_CHECK(refusal.empty(), "run_ranks_as_threads: ", ranks - static_cast<int64_t>(threads.size()), " of ", ranks, " ranks ",
              refusal);
}

} // namespace

} // namespace internal

void run_ranks_as_threads(int ranks, const std::function<void()>& program, const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(ranks >= 1, "run_ranks_as_threads: there are ", ranks, " ranks, but must be 1 at least");
  TORCH_CHECK_VALUE(program, "run_ranks_as_threads: the program is an empty function");
  TORCH_CHECK_VALUE(!options.own_store, "run_ranks_as_threads: ranks in one process take no ProcessGroupOptions::own_store");
  const auto in_effect = internal::with_overrides(options, internal::current_environment());
  const auto job = std::make_shared<internal::ThreadJob>(ranks, in_effect);
  const auto connect = [meetings = std::make_shared<internal::Meetings>(job)](std::string name, RankList list, int place,
                                                                              at::DeviceType device_type) {
    return internal::make_thread_communicator(*meetings, std::move(name), std::move(list), place, device_type);
  };
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const at::ThreadLocalState caller; // grad mode, autocast and the like are those of the caller
  internal::run_all(*job, ranks, [&](int rank) {
    const at::ThreadLocalStateGuard as_caller(caller);
    const auto enter = [&] { return std::make_unique<internal::RankScope>(rank, ranks, in_effect, store, connect); };
    internal::run_rank(*job, rank, enter, program);
  });
  if (const auto failure = job->first_failure())
    TORCH_CHECK(false, "run_ranks_as_threads: rank ", failure->rank, " of ", ranks, " threw: ", failure->text);
}

} // namespace tessera
