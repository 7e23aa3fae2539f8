#pragma once

#include <tessera/collectives/process_group_options.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal {

/// What the ranks of one `run_ranks_as_threads` know of each other: who has ended and why, and what each waits for. Any of their
/// threads may use it.
class ThreadJob {
 public:
  ThreadJob(int ranks, const ProcessGroupOptions& options);

  /// Its program has returned, or has thrown what `failure` says. Who waits for it gets an error.
  void end(int64_t rank, std::optional<std::string> failure);
  /// The rank that threw first.
  struct Failure {
    int64_t rank;
    std::string text;
  };
  std::optional<Failure> first_failure() const;
  /// Blocks until `is_done`, which is asked under the lock. Throws, after `text`, when a rank of those that `absent` lists has
  /// ended, or none comes in time.
  void wait(int64_t rank, const std::string& text, const std::function<bool()>& is_done,
            const std::function<std::vector<int64_t>()>& absent);

  std::mutex& mutex() { return mutex_; }
  void notify() { changed_.notify_all(); }

 private:
  struct Rank {
    bool has_ended = false;
    std::string failure;
    std::string waits_in; ///< the collective, while it waits for others
  };

  std::string describe(int64_t rank) const;
  std::optional<std::string> blame(const std::vector<int64_t>& absent) const;

  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::optional<int64_t> first_to_fail_;
};

} // namespace tessera::internal
