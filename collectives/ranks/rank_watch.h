#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// A rank for which another one waited in vain.
struct MissingRank {
  enum class Reason : char {
    kEnded = 'e',    ///< its process has ended, or closed its connections
    kTimedOut = 't', ///< it did not come within the timeout
    kAwaited = 'w',  ///< it has not come yet
    kLeft = 'l'      ///< it has left the group that waits, says so itself, and goes on: nothing is recorded
  };
  int64_t rank = -1;
  Reason reason = Reason::kEnded;

  bool operator==(const MissingRank&) const = default;
  std::string encode() const;
  static std::optional<MissingRank> decode(std::string_view text);
};

/// "rank 1, which has exited or failed"
std::string describe_ended(const std::vector<int64_t>& ranks);
/// "rank 1", "ranks 1, 2"
std::string list_of_ranks(const std::vector<int64_t>& ranks);

/// Who knows more than the watch of ranks whose processes cannot be seen from here.
class Witness {
 public:
  virtual ~Witness() = default;
  /// Whether a connection to `rank` is lost, which both sides would keep until they leave the job.
  virtual bool has_lost(int64_t rank) = 0;
};

/// Which ranks are gone, and which was the first.
///
/// A rank is missed only by those that wait for it: in a collective, or while a group is made. One that ended after its last
/// collective, with or without `destroy_process_group`, is missed by nobody. Whoever misses a rank says so in the job's store
/// before it closes connections or ends, so that those who miss it in turn come to the first. That one is recorded, before the
/// error is thrown, and is what every later error names. Where the store has gone with its host, each rank says what it sees
/// itself. Without communication until a rank is missed.
class RankWatch {
 public:
  /// `processes`: what `own_process` returned on each rank. `store`: the group's part of the job's store, `job_store`.
  RankWatch(int64_t rank, const std::vector<std::string>& processes, c10::intrusive_ptr<c10d::Store> store,
            c10::intrusive_ptr<c10d::Store> job_store);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  /// No other process has it.
  static std::string own_process();
  /// Whether `own_process` returned this in a process of this host that has ended.
  static bool has_ended_here(const std::string& process);
  /// The process of `rank` where it is on this host, and seen from here under that number: this rank's own as well.
  std::optional<pid_t> process_here(int64_t rank) const;
  int processes_here() const { return processes_here_; }

  /// Whether `has_ended` can tell.
  bool sees_end_of(int64_t rank) const;
  /// Whether the process of `rank` has ended, whatever holds its connections open. False where it cannot be seen: on other hosts.
  bool has_ended(int64_t rank) const;
  /// Asked by `find_missing` as long as it lives.
  void add_witness(std::weak_ptr<Witness> witness);
  /// The first of `ranks` that has ended, to which a connection is lost, or that the record names. Asks the store.
  std::optional<MissingRank> find_missing(const std::vector<int64_t>& ranks) const;
  /// Finds the same, but passes over those that have left because another did not come in time, and say so.
  std::optional<MissingRank> find_origin(std::vector<int64_t> ranks) const;
  /// Says whom this rank misses, and no more: before it closes connections.
  void announce(const MissingRank& missing) const;
  /// Says that this rank misses one of `ended`.
  void announce_ended(const std::vector<int64_t>& ended) const { announce({likely_ended(ended)}); }
  /// Says that this rank misses the first of some late ranks that has not said whom it misses itself; or the first. Returns it.
  int64_t announce_late(const std::vector<int64_t>& ranks) const {
    return announce_first_silent(ranks, MissingRank::Reason::kTimedOut);
  }
  /// Does what `announce_late` does, where the wait goes on. Otherwise those who wait for this rank would name this one, since
  /// their time is up sooner.
  int64_t announce_wait(const std::vector<int64_t>& ranks) const {
    return announce_first_silent(ranks, MissingRank::Reason::kAwaited);
  }
  /// When a wait that ends at `deadline` is long enough to be announced.
  static std::chrono::steady_clock::time_point announces_wait_at(std::chrono::steady_clock::time_point deadline,
                                                                 std::chrono::milliseconds timeout) {
    return deadline - 3 * timeout / 4;
  }
  /// Takes it back: what was missed has come after all.
  void withdraw() const;
  /// Takes back that it misses a rank that ended: it has met ranks in a group since, and goes on.
  void withdraw_ended() const {
    if (says_ended_) withdraw();
  }
  /// Says in `departures`, a part of the store for a group, that this rank leaves the group and goes on: before it closes
  /// connections.
  void announce_departure(c10::intrusive_ptr<c10d::Store> departures) const;
  /// Whether a rank has said so. Those who missed it have closed their connections of the group too, and go on.
  bool any_has_left(const c10::intrusive_ptr<c10d::Store>& departures) const;
  /// Of ranks that have ended and that this one waits for: records whom the one or those that it missed had missed first, where
  /// no other rank was recorded before, and returns the text for an error: "rank 1, which has exited or failed". Without the
  /// store nobody knows who was the first: then it names those of `ended` and `also_lost` whose processes are seen to have
  /// ended, or else all of them. One that has said in `departures`, where that is given, that it leaves the group has not ended.
  std::string blame(const std::vector<int64_t>& ended, const std::vector<int64_t>& also_lost = {},
                    const c10::intrusive_ptr<c10d::Store>& departures = {}) const;
  /// Of ranks that did not come in time: records the one that says nothing within a moment, or whom they have missed themselves,
  /// where no other was missed before. Returns the rest of an error about them: " (rank 1 has waited for rank 3 in vain)", or
  /// nothing. In a circle of ranks that wait for each other, that is the next of it. Of several ranks something is said of each.
  std::string note_timeout(const std::vector<int64_t>& ranks) const;

 private:
  int64_t likely_ended(const std::vector<int64_t>& ranks) const;
  std::optional<MissingRank> await_first_missing(int64_t found, const c10::intrusive_ptr<c10d::Store>& departures) const;
  bool has_left(int64_t rank, const c10::intrusive_ptr<c10d::Store>& departures) const;
  MissingRank follow(MissingRank missing) const;
  int64_t announce_first_silent(const std::vector<int64_t>& ranks, MissingRank::Reason reason) const;
  bool is_lost(int64_t rank) const;
  std::string describe_waiting(const std::vector<int64_t>& ranks) const;
  std::optional<MissingRank> read(const std::string& key) const;
  std::optional<MissingRank> record(const MissingRank& found) const;
  void say(const std::string& text) const;
  std::string ask_store(std::function<std::string()> question) const;

  const int64_t rank_;
  mutable std::atomic<bool> store_is_gone_{false};
  mutable std::atomic<bool> says_ended_{false}; ///< whether the last that this rank said is that it misses one that ended
  c10::intrusive_ptr<c10d::Store> store_, job_store_;
  static constexpr int kUnseen = -1, kGone = -2;
  std::vector<pid_t> ids_; ///< of each rank, or 0
  int processes_here_ = 0;
  std::vector<int> processes_; ///< of each rank a descriptor that can be polled for its end, kUnseen or kGone
  mutable std::mutex witnesses_mutex_;
  std::vector<std::weak_ptr<Witness>> witnesses_;
};

/// Through the job's store `launch` and its ranks tell one another of ends. Under this key the ranks leave the first missing
/// one, as `MissingRank::encode` writes it.
inline constexpr const char* kMissingRankKey = "tessera/missing";
/// `launch` adds each rank whose process has ended, in that order; other launchers say nothing.
void add_ended_rank(c10d::Store& job_store, int64_t rank);
std::vector<int64_t> ended_ranks(c10d::Store& job_store);

} // namespace tessera::internal
