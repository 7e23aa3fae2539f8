#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <tessera/base/descriptors.h>
#include <tessera/base/forks.h>
#include <tessera/collectives/ranks/group_store.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace c10d {
class ProcessGroupGloo;
} // namespace c10d

namespace tessera::internal::gloo {

/// The rank of the group that sends, and the one that receives.
struct Direction {
  int from = -1, to = -1;
  friend bool operator<(const Direction& a, const Direction& b) { return std::tie(a.from, a.to) < std::tie(b.from, b.to); }
};

/// A collective in flight, as the channel's threads see it.
class InFlight {
 public:
  virtual ~InFlight() = default;
  /// Completes it. On a background thread, where perhaps nobody waits for it.
  virtual void complete() = 0;
  /// Wakes the thread that waits for its messages: these peers are gone, or it has waited for long.
  virtual void wake(const std::vector<int>& lost) = 0;
  virtual void wake_because_the_channel_closes() = 0;
  virtual std::chrono::steady_clock::time_point wakes_from() const = 0; ///< fixed from `begin_wait` on
  /// Exchanges of one order complete in it: the group's collectives (the default), or the messages from one rank to another.
  virtual Direction order() const = 0;
};

struct ChannelOptions {
  std::chrono::milliseconds timeout;
  bool check_signatures = true;
  bool all_local = true;                           ///< every rank of the group is on this host: connect over the loopback address
  std::vector<int64_t> ranks = {};                 ///< of the group, in the job
  std::shared_ptr<RankWatch> watch = nullptr;      ///< of the job; needed
  c10::intrusive_ptr<c10d::Store> departures = {}; ///< as `GroupDescription` has it
  std::function<void(const std::string&)> on_failure = nullptr; ///< called once, with the first failure's text
};

/// One send or receive of bytes to or from a peer that gloo carries out in the background.
struct Message {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = -1;
  bool done = false; ///< waited for: gloo must not be asked again
};

/// The connections of one group, and what its collectives share: failure state, buffers, and threads.
///
/// gloo matches the messages between two ranks by tag, in the order posted. It ends the process when a message is longer than
/// the buffer that waits for it, so a payload's tag is its length: payloads of different lengths never meet.
class Channel : public Witness, public std::enable_shared_from_this<Channel> {
 public:
  static constexpr int kHeaderTag = 0;
  static constexpr int64_t kMaxMessageBytes = int64_t{1} << 28;
  /// This bit marks messages between two ranks outside of the group's order. A sentinel has none of these bits but the highest.
  static constexpr int kPairTag = 1 << 29;
  static constexpr int kPairHeaderTag =
      kPairTag | (static_cast<int>(kMaxMessageBytes) + 1); ///< to the higher rank; + 1: to the lower

  /// Connects every pair of ranks, with one descriptor a peer. gloo's listening port stays open, takes a descriptor for each
  /// stranger who connects to it, and ends the process when there is none left: `reserve_descriptors` spares a few.
  static std::shared_ptr<Channel> connect(const c10::intrusive_ptr<GroupStore>& store, int rank, int size,
                                          const ChannelOptions& options);
  ~Channel() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const ChannelOptions& options() const { return options_; }
  std::vector<int64_t> ranks_of(const std::vector<int>& peers) const; ///< in the job

  /// Held while a collective posts its messages, so that every pair of ranks sees them in one order.
  std::unique_lock<std::mutex> posting_order() { return std::unique_lock(posting_mutex_); }
  uint64_t next_sequence() { return sequence_++; } ///< with `posting_order` held
  uint64_t next_sequence(Direction direction) { return pair_sequences_[direction]++; }

  void send(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages);
  void receive(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages);
  /// Splits long payloads; `tag` < 0 means the tag that stands for the message's length, and kPairTag that one between two ranks.
  void send_payload(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages);
  void receive_payload(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages);

  /// kWoken: aborted. kClosedHere: this process has closed the connections, because another collective of the group failed.
  enum class Outcome { kDone, kWoken, kTimedOut, kClosedHere, kLost };
  /// Waits for one message until `deadline`, or until it is aborted. `cause` receives gloo's text of a failure.
  Outcome wait(Message& message, std::chrono::steady_clock::time_point deadline, std::string& cause);
  /// Whether a message has come. One that has not makes gloo close all connections of the group.
  bool has_come(Message& message);

  /// The group cannot be used after a failure: the first one's text is kept, and `check_usable` throws it.
  void fail(const std::string& message);
  /// As above, for a failure that was found elsewhere, and closes the connections: the peers shall not wait for this rank.
  void disconnect(const std::string& message);
  /// The first failure's text. Who has closed the connections says why in a moment; "" when that takes too long.
  std::string await_failure();
  void check_usable(const std::string& call) const;
  /// A forked child shares the connections: what it sends would reach the peers as its parent's.
  void check_not_forked(const std::string& call) const;
  bool is_forked_copy() const { return fork_depth() != fork_depth_; }

  /// The peers that are gone: the connection is lost, or the process has ended though something else holds its connections.
  std::vector<int> lost_peers();
  /// False after a failure of this group: either side may have closed its connections then.
  bool has_lost(int64_t rank) override;
  /// The text for an error that these ended the call, whom `RankWatch::blame` records: "rank 1, which has exited or failed".
  std::string blame(const std::vector<int>& peers);
  /// Keeps the messages of a failed collective: gloo may still write to their buffers.
  void keep_until_closed(std::shared_ptr<InFlight> exchange);

  /// Frees messages that are done, later: gloo's thread still holds them for a moment after it wakes the waiter, and freeing one
  /// that is held yields the processor, which then costs milliseconds where processes compete for it.
  void retire(std::vector<Message> messages);

  /// A cached byte buffer of at least `bytes`. Fresh memory costs a page fault for every 4 KiB.
  at::Tensor take_buffer(int64_t bytes);
  void return_buffer(at::Tensor buffer);

  /// Completes `exchange` on the background thread of its order: to make progress, or because nobody waits for it. A message
  /// that nobody sends yet must not keep a collective from its second round.
  void complete_in_background(std::shared_ptr<InFlight> exchange);
  /// Announces the exchange that a thread waits for; the monitor wakes it when one of its peers is gone, and
  /// in each of its rounds from `wakes_from` on.
  void begin_wait(InFlight* exchange);
  /// For messages that an exchange posted after `begin_wait`: those of a closed channel would be waited for until the timeout.
  void wake_if_closed(InFlight* exchange) const;
  void end_wait(InFlight* exchange);

  /// Wakes everybody who waits, with an error, and ends the threads. The communicator's last act. In a forked copy nothing.
  void close();
  /// Says that this rank goes on without the group, closes the connections, and does what `close` does.
  void leave();

 private:
  Channel(const c10::intrusive_ptr<GroupStore>& store, int rank, int size, const ChannelOptions& options);
  bool has_arrived(int rounds) const;
  void monitor_loop();
  struct Background {
    std::deque<std::shared_ptr<InFlight>> queue;
    std::thread thread;
  };
  void background_loop(Background& background);
  bool connection_lost(const Message& sentinel);
  std::vector<at::Tensor>& cache_for(int64_t bytes); ///< with `mutex_` held

  const int rank_, size_;
  const ChannelOptions options_;
  const int fork_depth_ = fork_depth();
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::mutex posting_mutex_;
  uint64_t sequence_ = 0;
  std::map<Direction, uint64_t> pair_sequences_;

  mutable std::mutex mutex_; // guards what follows
  std::condition_variable wake_monitor_, wake_background_, failed_;
  bool closed_ = false;
  std::string failure_;
  std::vector<std::shared_ptr<InFlight>> kept_;
  std::vector<at::Tensor> large_buffers_, small_buffers_;
  std::deque<std::vector<Message>> retired_;
  std::vector<InFlight*> waiting_;
  std::map<Direction, Background> background_; ///< by order; none is removed

  std::vector<Socket> sockets_;
  std::mutex sentinel_mutex_;      // guards the next three: gloo lets one thread wait for a message
  std::vector<Message> sentinels_; // receives that never complete: they fail when the peer's connection does
  std::vector<bool> lost_;         // peers
  std::vector<int> seen_ended_;    // how often the process of a peer was seen to have ended
  at::Tensor sentinel_byte_;
  std::thread monitor_;
};

} // namespace tessera::internal::gloo
