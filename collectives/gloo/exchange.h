#pragma once

#include <tessera/collectives/gloo/channel.h>
#include <tessera/collectives/signature.h>
#include <tessera/collectives/work.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::gloo {

/// Bytes in memory that somebody else keeps alive.
struct Bytes {
  void* data = nullptr;
  int64_t count = 0;
};

/// What every rank sends to and receives from every other one; the own entries are not used.
struct ExchangePlan {
  std::vector<Bytes> send, receive;
  std::function<void()> finish;                    ///< runs once, when all has arrived and has been sent
  std::unique_ptr<ExchangePlan> second_round = {}; ///< a further exchange, after `finish`
  /// Where ranks may differ in what they send (all_to_all): the bytes that this rank sends to each rank, then those that it
  /// expects from each. Every rank compares those of all.
  std::vector<int64_t> counts = {};
};

/// One collective in flight: everybody sends a part to everybody, and then something is computed.
///
/// Each pair of ranks exchanges a header first: the signature, the counts where the plan has some, and the payload behind them
/// when that is small. Long payloads follow at once and go straight to their place. `complete` compares the signatures and the
/// counts before it looks at any payload.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  /// Payloads up to this size travel in the header's message.
  static constexpr int64_t kInlineBytes = 16 << 10;

  Exchange(std::shared_ptr<Channel> channel, std::string call, std::vector<int64_t> ranks);

  /// Posts all messages. `signature` lacks the sequence number.
  void start(Signature signature, ExchangePlan plan);
  /// Blocks until the result is valid, on the first call. Throws nothing: `rethrow_failure` does.
  void complete();
  void rethrow_failure() const;
  bool is_completed() const { return completed_; }

  /// Wakes the waiting thread: messages of `peer`, or all of them.
  void wake(int peer = -1);

 private:
  void run();
  void post_headers(const Signature& signature);
  void post_payloads();
  void receive_headers();
  void check_signatures() const;
  void check_counts() const;
  void unpack_headers() const;
  void run_second_round(const ExchangePlan& plan);
  void wait_for(const std::vector<Message>& messages, const char* what);
  [[noreturn]] void throw_lost(int peer, const std::string& cause) const;
  [[noreturn]] void throw_timed_out(const std::string& what) const;
  bool has_header() const;
  bool is_inline(const Bytes& bytes) const { return has_header() && bytes.count <= kInlineBytes; }
  int64_t header_bytes() const;
  int64_t counts_bytes() const { return static_cast<int64_t>(plan_.counts.size() * sizeof(int64_t)); }
  char* sent_header(int peer) const;
  char* received_header(int peer) const; ///< this rank's own entry has no payload

  const std::shared_ptr<Channel> channel_;
  const std::string call_; // for errors
  const std::vector<int64_t> ranks_;
  Signature signature_;
  ExchangePlan plan_;
  at::Tensor header_buffer_;
  std::mutex messages_mutex_; // guards the lists against `wake`
  std::vector<Message> header_receives_, receives_, sends_;
  std::chrono::steady_clock::time_point deadline_;

  std::mutex completing_;
  std::atomic<bool> completed_{false};
  std::exception_ptr failure_;
};

/// The user's handle of an exchange. One that is dropped before `wait` is completed in the background.
class ExchangeWork final : public WorkState {
 public:
  ExchangeWork(std::shared_ptr<Channel> channel, std::shared_ptr<Exchange> exchange)
      : channel_(std::move(channel)), exchange_(std::move(exchange)) {}
  ~ExchangeWork() override;
  void wait() override;
  bool is_completed() override;

 private:
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Exchange> exchange_;
  bool in_background_ = false;
};

} // namespace tessera::gloo
