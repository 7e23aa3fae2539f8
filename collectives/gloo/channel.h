#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace c10d {
class ProcessGroupGloo;
class Store;
} // namespace c10d

namespace tessera::gloo {

class Exchange;

struct ChannelOptions {
  std::chrono::milliseconds timeout;
  bool check_signatures = true;
  bool all_local = true; ///< every rank of the group is on this host: connect over the loopback address
};

/// One send or receive of bytes to or from a peer that gloo carries out in the background.
struct Message {
  c10::intrusive_ptr<c10d::Work> work;
  int peer = -1;
};

/// The connections of one group, and what its collectives share: failure state, buffers, and two threads.
///
/// gloo matches the messages between two ranks by tag, in the order posted. It ends the process when a message is longer than
/// the buffer that waits for it, so a payload's tag is its length: payloads of different lengths never meet.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  static constexpr int kHeaderTag = 0;
  static constexpr int64_t kMaxMessageBytes = int64_t{1} << 28;

  Channel(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const ChannelOptions& options);
  ~Channel();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const ChannelOptions& options() const { return options_; }

  /// Held while a collective posts its messages, so that every pair of ranks sees them in one order.
  std::unique_lock<std::mutex> posting_order() { return std::unique_lock(posting_mutex_); }
  uint64_t next_sequence() { return sequence_++; } ///< with `posting_order` held

  void send(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages);
  void receive(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages);
  /// Splits long payloads; `tag` < 0 means the tag that stands for the message's length.
  void send_payload(int peer, int tag, const void* data, int64_t bytes, std::vector<Message>& messages);
  void receive_payload(int peer, int tag, void* data, int64_t bytes, std::vector<Message>& messages);

  enum class Outcome { kDone, kTimedOut, kLost };
  /// Waits for one message until `deadline`. `cause` receives gloo's text when it is not done.
  Outcome wait(const Message& message, std::chrono::steady_clock::time_point deadline, std::string& cause);

  /// The group cannot be used after a failure: the first one's text is kept, and `check_usable` throws it.
  void fail(const std::string& message);
  void check_usable(const std::string& call) const;
  /// Keeps the messages of a failed collective: gloo may still write to their buffers.
  void keep_until_closed(std::shared_ptr<Exchange> exchange);

  /// Frees messages that are done, later: gloo's thread still holds them for a moment after it wakes the waiter, and freeing one
  /// that is held yields the processor, which then costs milliseconds where processes compete for it.
  void retire(std::vector<Message> messages);

  /// A cached byte buffer of at least `bytes`. Fresh memory costs a page fault for every 4 KiB.
  at::Tensor take_buffer(int64_t bytes);
  void return_buffer(at::Tensor buffer);

  /// Completes `exchange` on the background thread: to make progress, or because nobody waits for it.
  void complete_in_background(std::shared_ptr<Exchange> exchange);
  /// Announces the exchange that a thread waits for; the monitor wakes it when one of its peers is gone.
  void begin_wait(Exchange* exchange);
  /// For messages that an exchange posted after `begin_wait`: those of a closed channel would be waited for until the timeout.
  void wake_if_closed(Exchange* exchange) const;
  void end_wait(Exchange* exchange);

  /// Wakes everybody who waits, with an error, and ends the threads. The communicator's last act.
  void close();

 private:
  void watch_peers();
  void monitor_loop();
  void background_loop();
  bool connection_lost(int peer);
  std::vector<at::Tensor>& cache_for(int64_t bytes); ///< with `mutex_` held

  const int rank_, size_;
  const ChannelOptions options_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::mutex posting_mutex_;
  uint64_t sequence_ = 0;

  mutable std::mutex mutex_; // guards what follows
  std::condition_variable wake_monitor_, wake_background_;
  bool closed_ = false;
  std::string failure_;
  std::vector<std::shared_ptr<Exchange>> kept_;
  std::vector<at::Tensor> large_buffers_, small_buffers_;
  std::deque<std::vector<Message>> retired_;
  std::vector<Exchange*> waiting_;
  std::deque<std::shared_ptr<Exchange>> background_queue_;

  std::vector<Message> sentinels_; // receives that never complete: they fail when the peer's connection does
  at::Tensor sentinel_byte_;
  std::thread monitor_, background_;
};

} // namespace tessera::gloo
