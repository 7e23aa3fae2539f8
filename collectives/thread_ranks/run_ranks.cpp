#include <tessera/collectives/run_ranks.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/job_environment.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/rank_scope.h>
#include <tessera/collectives/thread_ranks/thread_communicator.h>
#include <tessera/collectives/thread_ranks/thread_job.h>

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <memory>
#include <optional>
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

} // namespace

} // namespace internal

void run_ranks_as_threads(int ranks, const std::function<void()>& program, const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(ranks >= 1, "run_ranks_as_threads: there are ", ranks, " ranks, but must be 1 at least");
  TORCH_CHECK_VALUE(program, "run_ranks_as_threads: the program is an empty function");
  const auto in_effect = internal::with_overrides(options, internal::current_environment());
  const auto job = std::make_shared<internal::ThreadJob>(ranks, in_effect);
  const auto connect = [meetings = std::make_shared<internal::Meetings>(job)](std::string name, RankList list, int place,
                                                                              at::DeviceType device_type) {
    return internal::make_thread_communicator(*meetings, std::move(name), std::move(list), place, device_type);
  };
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  const at::ThreadLocalState caller; // grad mode, autocast and the like are those of the caller
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const at::ThreadLocalStateGuard as_caller(caller);
      const auto enter = [&] { return std::make_unique<internal::RankScope>(rank, ranks, in_effect, store, connect); };
      internal::run_rank(*job, rank, enter, program);
    });
  }
  for (auto& thread : threads) thread.join();
  if (const auto failure = job->first_failure())
    TORCH_CHECK(false, "run_ranks_as_threads: rank ", failure->rank, " of ", ranks, " threw: ", failure->text);
}

} // namespace tessera
