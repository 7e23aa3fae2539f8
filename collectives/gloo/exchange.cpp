#include <tessera/collectives/gloo/exchange.h>

#include <tessera/collectives/error_text.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>

namespace tessera::gloo {

namespace {

constexpr int kSecondRoundTag = 1 << 30; // the low bits are the sequence number

} // namespace

Exchange::Exchange(std::shared_ptr<Channel> channel, std::string call, std::vector<int64_t> ranks)
    : channel_(std::move(channel)), call_(std::move(call)), ranks_(std::move(ranks)) {}

bool Exchange::has_header() const {
  return channel_->options().check_signatures || signature_.kind == static_cast<uint8_t>(CollectiveKind::kBarrier);
}

// The same for every collective: gloo ends the process when a message is longer than the buffer that waits for it.
int64_t Exchange::header_bytes() const {
  const auto largest_counts = 2 * channel_->size() * static_cast<int64_t>(sizeof(int64_t));
  return static_cast<int64_t>(sizeof(Signature)) + largest_counts + kInlineBytes;
}

char* Exchange::sent_header(int peer) const { return static_cast<char*>(header_buffer_.data_ptr()) + peer * header_bytes(); }

char* Exchange::received_header(int peer) const { return sent_header(channel_->size() + peer); }

void Exchange::start(Signature signature, ExchangePlan plan) {
  channel_->check_usable(call_);
  signature_ = signature;
  plan_ = std::move(plan);
  if (has_header()) header_buffer_ = channel_->take_buffer(2 * channel_->size() * header_bytes());
  try {
    const auto order = channel_->posting_order();
    signature_.sequence = channel_->next_sequence();
    if (has_header()) post_headers(signature_);
    post_payloads();
  } catch (const std::exception& error) {
    channel_->keep_until_closed(shared_from_this());
    channel_->fail(c10::str(call_, ": ", error_text(error)));
    C10_THROW_ERROR(DistNetworkError,
                    c10::str(call_, ": a connection was lost, another rank may have exited. ", error_text(error)));
  }
}

void Exchange::post_headers(const Signature& signature) {
  for (int peer = 0; peer < channel_->size(); ++peer) {
    const bool own = peer == channel_->rank();
    auto* end = own ? received_header(peer) : sent_header(peer);
    const auto* begin = end;
    const auto append = [&](const void* data, int64_t bytes) {
      if (bytes > 0) std::memcpy(end, data, bytes);
      end += bytes;
    };
    append(&signature, sizeof(signature));
    append(plan_.counts.data(), counts_bytes());
    if (own) continue;
    const auto& payload = plan_.send[peer];
    if (is_inline(payload)) append(payload.data, payload.count);
    channel_->receive(peer, Channel::kHeaderTag, received_header(peer), header_bytes(), header_receives_);
    channel_->send(peer, Channel::kHeaderTag, begin, end - begin, sends_);
  }
}

void Exchange::post_payloads() {
  // Start with the next rank, so that not all ranks send to the same one first.
  for (int step = 1; step < channel_->size(); ++step) {
    const int to = (channel_->rank() + step) % channel_->size();
    const int from = (channel_->rank() - step + channel_->size()) % channel_->size();
    const auto &incoming = plan_.receive[from], &outgoing = plan_.send[to];
    if (!is_inline(incoming)) channel_->receive_payload(from, -1, incoming.data, incoming.count, receives_);
    if (!is_inline(outgoing)) channel_->send_payload(to, -1, outgoing.data, outgoing.count, sends_);
  }
}

void Exchange::complete() {
  std::lock_guard lock(completing_);
  if (completed_) return;
  channel_->begin_wait(this);
  try {
    run();
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    channel_->fail(error_text(error));
    channel_->keep_until_closed(shared_from_this());
  }
  channel_->end_wait(this);
  if (!failure_) {
    if (header_buffer_.defined()) channel_->return_buffer(std::move(header_buffer_));
    for (auto* messages : {&header_receives_, &receives_, &sends_}) channel_->retire(std::move(*messages));
    plan_ = {};
  }
  completed_ = true;
}

void Exchange::run() {
  deadline_ = std::chrono::steady_clock::now() + channel_->options().timeout;
  if (has_header()) {
    receive_headers();
    check_signatures();
    check_counts();
    unpack_headers();
  }
  wait_for(receives_, "the payload");
  wait_for(sends_, "the receipt");
  if (plan_.finish) plan_.finish();
  if (plan_.second_round) run_second_round(*plan_.second_round);
}

void Exchange::receive_headers() {
  std::string cause;
  for (const auto& message : header_receives_) {
    const auto outcome = channel_->wait(message, deadline_, cause);
    if (outcome == Channel::Outcome::kDone) continue;
    if (outcome == Channel::Outcome::kLost) throw_lost(message.peer, cause);
    std::vector<int64_t> missing; // gloo has closed the connections by now: what did not come will not come
    for (const auto& other : header_receives_)
      if (other.peer >= message.peer && channel_->wait(other, deadline_, cause) != Channel::Outcome::kDone)
        missing.push_back(ranks_[other.peer]);
    throw_timed_out(c10::str("the call of rank", missing.size() == 1 ? " " : "s ", c10::Join(", ", missing)));
  }
}

void Exchange::check_signatures() const {
  std::vector<Signature> signatures(channel_->size());
  for (int rank = 0; rank < channel_->size(); ++rank) std::memcpy(&signatures[rank], received_header(rank), sizeof(Signature));
  const bool same =
      std::all_of(signatures.begin(), signatures.end(), [&](const auto& s) { return s.same_collective(signature_); });
  TORCH_CHECK(same, call_, ": the ranks of the group called different collectives:", describe_signatures(signatures, ranks_));
}

void Exchange::check_counts() const {
  if (plan_.counts.empty()) return;
  const int size = channel_->size();
  const auto count = [&](int rank, int index) {
    int64_t value = 0;
    std::memcpy(&value, received_header(rank) + sizeof(Signature) + index * sizeof(value), sizeof(value));
    return value;
  };
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const auto sent = count(from, to), expected = count(to, size + from);
      TORCH_CHECK(sent == expected, call_, ": rank ", ranks_[from], " sends ", sent, " bytes to rank ", ranks_[to],
                  ", which expects ", expected, " from it");
    }
  }
}

void Exchange::unpack_headers() const {
  for (int peer = 0; peer < channel_->size(); ++peer) {
    const auto& incoming = plan_.receive[peer];
    if (peer != channel_->rank() && is_inline(incoming) && incoming.count > 0)
      std::memcpy(incoming.data, received_header(peer) + sizeof(Signature) + counts_bytes(), incoming.count);
  }
}

void Exchange::wait_for(const std::vector<Message>& messages, const char* what) {
  std::string cause;
  for (const auto& message : messages) {
    const auto outcome = channel_->wait(message, deadline_, cause);
    if (outcome == Channel::Outcome::kLost) throw_lost(message.peer, cause);
    if (outcome == Channel::Outcome::kTimedOut) throw_timed_out(c10::str(what, " of rank ", ranks_[message.peer]));
  }
}

void Exchange::run_second_round(const ExchangePlan& plan) {
  const int tag = kSecondRoundTag | static_cast<int>(signature_.sequence & (kSecondRoundTag - 1));
  std::vector<Message> receives, sends;
  {
    const auto order = channel_->posting_order();
    for (int step = 1; step < channel_->size(); ++step) {
      const int to = (channel_->rank() + step) % channel_->size();
      const int from = (channel_->rank() - step + channel_->size()) % channel_->size();
      channel_->receive_payload(from, tag, plan.receive[from].data, plan.receive[from].count, receives);
      channel_->send_payload(to, tag, plan.send[to].data, plan.send[to].count, sends);
    }
  }
  {
    std::lock_guard lock(messages_mutex_);
    receives_ = std::move(receives);
    sends_ = std::move(sends);
  }
  channel_->wake_if_closed(this);
  wait_for(receives_, "the second round");
  wait_for(sends_, "the receipt of the second round");
}

void Exchange::wake(int peer) {
  std::lock_guard lock(messages_mutex_);
  for (const auto* messages : {&header_receives_, &receives_, &sends_})
    for (const auto& message : *messages)
      if (peer < 0 || message.peer == peer) message.work->abort();
}

void Exchange::throw_lost(int peer, const std::string& cause) const {
  C10_THROW_ERROR(DistNetworkError, c10::str(call_, ": lost the connection to rank ", ranks_[peer],
                                             ", which has exited or failed", cause.empty() ? "" : ". ", cause));
}

void Exchange::throw_timed_out(const std::string& what) const {
  C10_THROW_ERROR(DistNetworkError,
                  c10::str(call_, ": timed out after ", channel_->options().timeout.count(), " ms, waiting for ", what));
}

void Exchange::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

ExchangeWork::~ExchangeWork() {
  if (!exchange_->is_completed() && !in_background_) channel_->complete_in_background(exchange_);
}

void ExchangeWork::wait() {
  exchange_->complete();
  exchange_->rethrow_failure();
}

bool ExchangeWork::is_completed() {
  if (exchange_->is_completed()) return true;
  // gloo cannot be asked whether a message has come, only be waited for.
  if (!in_background_) channel_->complete_in_background(exchange_);
  in_background_ = true;
  return false;
}

} // namespace tessera::gloo
