#pragma once

#include <tessera/collectives/backends/gloo/channel.h>
#include <tessera/collectives/calls/signature.h>
#include <tessera/collectives/work.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::internal::gloo {

/// Bytes in memory that somebody else keeps alive.
struct Bytes {
  void* data = nullptr;
  int64_t count = 0;
};

/// What every rank sends to and receives from every other one; the own entries are not used.
struct ExchangePlan {
  explicit ExchangePlan(int ranks = 0) : send(ranks), receive(ranks) {}

  std::vector<Bytes> send, receive;
  std::function<void()> finish;                    ///< runs once, when all has arrived and has been sent
  std::unique_ptr<ExchangePlan> second_round = {}; ///< a further exchange, after `finish`
  /// The bytes that this rank sends to each rank, then those that it expects from each, where ranks may differ in what they send
  /// (all_to_all). Every rank compares those of all.
  std::vector<int64_t> counts = {};
  /// Where one rank sends to another, and no third takes part: these two.
  std::optional<Direction> direction = {};
};

/// One collective in flight: everybody sends a part to everybody, and then something is computed.
///
/// Each pair of ranks exchanges a header first: the signature, the counts where the plan has some, and the payload behind them
/// when that is small. Long payloads follow at once and go straight to their place. `complete` compares the signatures and the
/// counts before it looks at any payload.
class Exchange final : public InFlight, public std::enable_shared_from_this<Exchange> {
 public:
  /// Payloads up to this size travel in the header's message.
  static constexpr int64_t kInlineBytes = 16 << 10;

  Exchange(std::shared_ptr<Channel> channel, std::string call) : channel_(std::move(channel)), call_(std::move(call)) {}

  /// Posts all messages. `signature` lacks the sequence number.
  void start(Signature signature, ExchangePlan plan);
  /// Blocks until the result is valid, or throws why it never will be: also on later calls.
  void wait();
  bool is_completed() const { return completed_; }
  /// Whether it has failed; asked after its completion.
  bool has_failed() const { return failure_ != nullptr; }
  std::exception_ptr failure() const { return failure_; }

  /// As `wait`, for nobody: throws nothing, and records no rank as missing unless somebody waits meanwhile.
  void complete() override;
  void wake(const std::vector<int>& lost) override;
  void wake_because_the_channel_closes() override;
  Direction order() const override { return order_; }
  std::chrono::steady_clock::time_point wakes_from() const override {
    return RankWatch::announces_wait_at(deadline_, channel_->options().timeout);
  }

 private:
  /// Thrown where peers do not come.
  struct Absence : std::exception {
    Absence(std::vector<int> p, bool t, std::string w) : peers(std::move(p)), timed_out(t), what_happened(std::move(w)) {}
    std::vector<int> peers;
    bool timed_out;
    std::string what_happened; ///< gloo's text, or what they were waited for with
  };

  void run();
  void post_headers(const Signature& signature);
  /// Posts the payloads of more than `longer_than` bytes. `tag` < 0 means those that stand for a message's length.
  void post_payloads(const ExchangePlan& plan, int tag, int64_t longer_than, std::vector<Message>& receives,
                     std::vector<Message>& sends);
  void receive_headers();
  void check_signatures() const;
  void check_counts() const;
  void unpack_headers() const;
  void run_second_round(const ExchangePlan& plan);
  void wait_for(std::vector<Message>& messages, const char* what);
  Channel::Outcome wait_for(Message& message, std::string& cause);
  void check_lost_peers();
  [[noreturn]] void throw_closed() const;
  void fail(const Absence& absence, bool is_awaited);
  std::string explain(const Absence& absence, bool is_awaited) const;
  void abort_messages();
  bool has_header() const;
  int header_tag() const;
  std::vector<int> participants() const;
  int64_t header_bytes() const;
  int64_t counts_bytes() const { return static_cast<int64_t>(plan_.counts.size() * sizeof(int64_t)); }
  char* sent_header(int peer) const;
  char* received_header(int peer) const; ///< this rank's own entry has no payload

  const std::shared_ptr<Channel> channel_;
  const std::string call_; // for errors
  const std::vector<int64_t>& ranks_ = channel_->options().ranks;
  Signature signature_;
  ExchangePlan plan_;
  Direction order_; ///< fixed from `start` on
  at::Tensor header_buffer_;
  std::mutex messages_mutex_; // guards the lists against `wake`, and what it says
  std::vector<Message> header_receives_, receives_, sends_;
  std::vector<int> lost_peers_;
  bool channel_closes_ = false;
  std::chrono::steady_clock::time_point deadline_;

  std::mutex completing_;
  std::atomic<bool> completed_{false}, awaited_{false};
  std::exception_ptr failure_;
  std::optional<Absence> unexplained_; // the failure, where nobody waited
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

} // namespace tessera::internal::gloo
