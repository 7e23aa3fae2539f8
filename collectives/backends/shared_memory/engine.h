#pragma once

#include <tessera/base/forks.h>
#include <tessera/collectives/backends/shared_memory/memory/arenas.h>
#include <tessera/collectives/backends/shared_memory/memory/group_memory.h>
#include <tessera/collectives/backends/shared_memory/operation.h>
#include <tessera/collectives/ranks/rank_watch.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::internal::shared_memory {

struct EngineOptions {
  std::string group; ///< for errors: of group default [0, 1] on rank 1
  std::vector<int64_t> ranks = {};
  int rank = 0;                   ///< this process's index in `ranks`
  std::vector<char*> arenas = {}; ///< of each rank; empty where not all have one
  std::shared_ptr<Arenas> memory; ///< where those lie: calls in flight may outlive the communicator
  std::chrono::milliseconds timeout;
  std::shared_ptr<RankWatch> watch;
  c10::intrusive_ptr<c10d::Store> departures = {}; ///< as `GroupDescription` has it
  std::chrono::microseconds spin = {};             ///< before a waiting thread sleeps
  bool shares_cores = false;                       ///< ranks outnumber the cores: who spins lets the others run
  std::chrono::microseconds background_delay = {}; ///< before the background thread goes on with what nobody waits for yet
};

/// The calls of one group in flight, and who moves them on.
///
/// On each lane they run in order. Nothing here waits for a call to come to its end but `wait`: the threads that wait move on all
/// lanes, one thread at a time, and sleep where nothing can go on. Where nobody waits, a background thread does.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  static std::shared_ptr<Engine> make(GroupMemory memory, EngineOptions options);
  ~Engine();

  /// A lane by the ranks (of the group) that send and receive on it; that of the whole group by default.
  struct LaneKey {
    int from = -1, to = -1;
    bool operator==(const LaneKey&) const = default;
    friend bool operator<(const LaneKey& a, const LaneKey& b) { return std::tie(a.from, a.to) < std::tie(b.from, b.to); }
  };
  std::shared_ptr<Operation> start(LaneKey lane, Request&& request);
  /// Blocks until the result is valid, or throws why it never will be: also on later calls.
  void wait(Operation& operation);
  bool is_completed(Operation& operation);
  /// As `wait`, for nobody: throws nothing, and records no rank as missing unless somebody waits meanwhile.
  void complete(Operation& operation);
  /// Completes it on the engine's own thread.
  void complete_in_background(Operation& operation);
  /// For a failure that was found elsewhere: ends all calls with it, here and on the other ranks, and allows no more.
  void fail(const std::string& text);

  /// A forked child has no part in the group.
  void check_not_forked(const std::string& call) const;
  bool is_forked_copy() const { return fork_depth() != fork_depth_; }

  /// Wakes everybody who waits, with an error, and ends the thread. The communicator's last act. In a forked copy nothing.
  void close();
  /// Says that this rank goes on without the group, and does what `close` does.
  void leave();

 private:
  using Clock = Operation::Clock;
  using OperationPtr = std::shared_ptr<Operation>;
  struct Line {
    Lane lane;
    Members members;
    bool is_of_all; ///< ranks of the group
    std::deque<OperationPtr> queue = {};
    size_t published = 0;   ///< how many of them
    uint64_t next_call = 0; ///< the sequence number of the first that is not published
  };

  Engine(GroupMemory memory, EngineOptions options);
  void check_usable(const std::string& call) const;
  Line& line_of(LaneKey key);
  void publish(Line& line);
  OperationPtr front_of(Line& line);
  std::vector<Line*> lines();

  bool try_to_advance();
  bool advance(Line& line);
  void finish_front(Line& line, const OperationPtr& operation);
  void sleep(const Operation* operation);
  void look_for_polled(const Operation& operation);
  void look_for_absences();
  void look_for_absences(Line& line);
  void await(const Operation& operation);
  bool start_time_limit(const Operation& operation);
  void end_waiting();
  void wake_threads_here();

  void announce_long_wait(Operation& operation, Clock::time_point deadline, const std::vector<int64_t>& ranks);
  void withdraw_announcement(Operation& operation) const;
  void fail_front(Line& line, const Absence& absence);
  void fail_front(Line& line, std::exception_ptr failure, const std::string& text, std::optional<Absence> unexplained = {});
  void fail_all_queued(const std::string& why);
  std::string explain(const Operation& operation, const Absence& absence, bool is_awaited) const;
  std::vector<int64_t> ended_ranks() const;
  void explain_and_throw(Operation& operation);

  void note_duty(Operation& operation, std::chrono::microseconds delay); ///< of a queue, with `mutex_` held
  void background_loop();

  const EngineOptions options_;
  const int fork_depth_ = fork_depth();
  GroupMemory memory_;
  std::atomic<bool> driving_{false};        ///< a thread is in `advance`; see `Driving`
  std::atomic<int> waiting_{0}, asleep_{0}; ///< threads of this process
  std::atomic<int> reporting_waiters_{0};   ///< waiting threads whose caller gets the error
  std::atomic<bool> closed_{false};
  std::mutex explaining_;

  mutable std::mutex mutex_; // guards what follows
  std::map<LaneKey, std::unique_ptr<Line>> lines_;
  std::string failure_;
  int background_work_ = 0; ///< operations in the queues with `needs_background`
  Clock::time_point background_begins_, next_polled_look_;
  std::condition_variable wake_background_;
  std::thread background_;
};

} // namespace tessera::internal::shared_memory
