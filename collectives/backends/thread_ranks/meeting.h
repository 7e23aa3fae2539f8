#pragma once

#include <tessera/collectives/backends/thread_ranks/contribution.h>
#include <tessera/collectives/backends/thread_ranks/thread_job.h>
#include <tessera/collectives/rank_list.h>
#include <tessera/collectives/work.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::internal {

/// Where the ranks of a group, each in its thread, exchange data: the rank that comes last to a collective does what is to be
/// done for all, on their memory. So collectives need no threads of their own, and are over when all have called them.
class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(std::shared_ptr<ThreadJob> job, RankList ranks) : job_(std::move(job)), ranks_(std::move(ranks)) {}

  /// The next collective of all ranks of the group.
  Work come(int place, Contribution contribution);
  /// The next message from one rank to another; `place` is one of the two.
  Work come(int from, int to, int place, Contribution contribution);
  /// A member calls nothing more. What it has called, or others wait in for it, ends with an error.
  void leave(int place);

 private:
  class Wait;
  /// One collective, until all have come.
  struct Gathering {
    std::vector<int> members; ///< places in the group, in order
    std::vector<std::optional<Contribution>> contributions;
    size_t came = 0;
    bool is_done = false;
    std::string failure;
  };
  using GatheringPtr = std::shared_ptr<Gathering>;
  /// Collectives that the same members call in the same order: those of the group, or the messages of two.
  struct Line {
    std::vector<uint64_t> calls; ///< of each member
    std::map<uint64_t, GatheringPtr> open;
  };

  Work join(std::pair<int, int> key, std::vector<int> members, int place, Contribution contribution);
  void check_usable(const std::vector<int>& members, const std::string& text) const;
  void complete(Gathering& gathering);
  std::string difference(const Gathering& gathering) const;
  std::vector<int64_t> absent(const Gathering& gathering) const;

  std::shared_ptr<ThreadJob> job_; // its lock guards what follows
  RankList ranks_;
  std::map<std::pair<int, int>, Line> lines_;
  std::string failure_; // of an earlier collective
  std::set<int> left_;  // places of those who call nothing more
};

/// The meetings of a job.
class Meetings {
 public:
  explicit Meetings(std::shared_ptr<ThreadJob> job) : job_(std::move(job)) {}
  /// The one of all ranks that ask with the same group and purpose.
  std::shared_ptr<Meeting> of(const RankList& ranks, const std::string& purpose);

 private:
  std::shared_ptr<ThreadJob> job_;
  std::mutex mutex_;
  std::map<std::tuple<RankList, std::string>, std::weak_ptr<Meeting>> meetings_;
};

} // namespace tessera::internal
