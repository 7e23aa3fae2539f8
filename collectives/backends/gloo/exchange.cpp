#include <tessera/collectives/backends/gloo/exchange.h>

#include <tessera/base/error_text.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace tessera::internal::gloo {

namespace {

constexpr int kSecondRoundTag = 1 << 30; // the low bits are the sequence number
// How late the channel's monitor may be at the deadline. Behind that, gloo ends the wait.
constexpr std::chrono::seconds kMonitorLimit(2);

} // namespace

bool Exchange::has_header() const {
  return channel_->options().check_signatures || signature_.kind == static_cast<uint8_t>(CollectiveKind::kBarrier);
}

std::vector<int> Exchange::participants() const {
  if (plan_.direction) return {plan_.direction->from, plan_.direction->to};
  std::vector<int> all(channel_->size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

int Exchange::header_tag() const {
  if (!plan_.direction) return Channel::kHeaderTag;
  return Channel::kPairHeaderTag + (plan_.direction->from < plan_.direction->to ? 0 : 1);
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
  order_ = plan_.direction.value_or(Direction());
  if (has_header()) header_buffer_ = channel_->take_buffer(2 * channel_->size() * header_bytes());
  try {
    const auto order = channel_->posting_order();
    const auto& direction = plan_.direction;
    signature_.sequence = direction ? channel_->next_sequence(*direction) : channel_->next_sequence();
    if (has_header()) post_headers(signature_);
    post_payloads(plan_, direction ? Channel::kPairTag : -1, has_header() ? kInlineBytes : 0, receives_, sends_);
  } catch (const std::exception& error) {
    const auto lost = channel_->lost_peers();
    const auto text = c10::str(
        call_, ": lost ",
        lost.empty() ? c10::str("a connection. ", error_text(error)) : c10::str("the connection to ", channel_->blame(lost)));
    channel_->keep_until_closed(shared_from_this());
    channel_->fail(text);
    C10_THROW_ERROR(DistNetworkError, text);
  }
}

void Exchange::post_headers(const Signature& signature) {
  for (const int peer : participants()) {
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
    if (payload.count <= kInlineBytes) append(payload.data, payload.count);
    channel_->receive(peer, header_tag(), received_header(peer), header_bytes(), header_receives_);
    channel_->send(peer, header_tag(), begin, end - begin, sends_);
  }
}

void Exchange::post_payloads(const ExchangePlan& plan, int tag, int64_t longer_than, std::vector<Message>& receives,
                             std::vector<Message>& sends) {
  // Start with the next rank, so that not all ranks send to the same one first.
  for (int step = 1; step < channel_->size(); ++step) {
    const int to = (channel_->rank() + step) % channel_->size();
    const int from = (channel_->rank() - step + channel_->size()) % channel_->size();
    const auto &incoming = plan.receive[from], &outgoing = plan.send[to];
    if (incoming.count > longer_than) channel_->receive_payload(from, tag, incoming.data, incoming.count, receives);
    if (outgoing.count > longer_than) channel_->send_payload(to, tag, outgoing.data, outgoing.count, sends);
  }
}

void Exchange::wait() {
  awaited_ = true;
  complete();
  std::lock_guard lock(completing_);
  if (unexplained_) fail(*std::exchange(unexplained_, std::nullopt), true);
  if (failure_) std::rethrow_exception(failure_);
}

void Exchange::complete() {
  std::lock_guard lock(completing_);
  if (completed_) return;
  deadline_ = std::chrono::steady_clock::now() + channel_->options().timeout;
  channel_->begin_wait(this);
  try {
    run();
  } catch (const Absence& absence) {
    const bool is_awaited = awaited_;
    fail(absence, is_awaited);
    if (!is_awaited) unexplained_ = absence;
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    channel_->fail(error_text(error));
  }
  channel_->end_wait(this);
  if (failure_) {
    channel_->keep_until_closed(shared_from_this());
  } else {
    if (header_buffer_.defined()) channel_->return_buffer(std::move(header_buffer_));
    for (auto* messages : {&header_receives_, &receives_, &sends_}) channel_->retire(std::move(*messages));
    plan_ = ExchangePlan();
  }
  completed_ = true;
}

void Exchange::run() {
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
  for (auto& message : header_receives_) {
    const auto outcome = wait_for(message, cause);
    if (outcome == Channel::Outcome::kDone) continue;
    if (outcome == Channel::Outcome::kLost) throw Absence({message.peer}, false, cause);
    std::vector<int> missing; // the connections are closed by now: what did not come will not come
    for (auto& other : header_receives_)
      if (&other == &message || !channel_->has_come(other)) missing.push_back(other.peer);
    throw Absence(missing, true,
                  c10::str("the call of rank", missing.size() == 1 ? " " : "s ", c10::Join(", ", channel_->ranks_of(missing)),
                           plan_.direction ? "" : ": every rank of the group must call it"));
  }
}

void Exchange::check_signatures() const {
  std::vector<Signature> signatures;
  std::vector<int64_t> ranks;
  for (const int rank : participants()) {
    std::memcpy(&signatures.emplace_back(), received_header(rank), sizeof(Signature));
    ranks.push_back(ranks_[rank]);
  }
  const bool same =
      std::all_of(signatures.begin(), signatures.end(), [&](const auto& s) { return s.same_collective(signature_); });
  TORCH_CHECK(same, call_, ": the ranks of the group called different collectives:", describe_signatures(signatures, ranks));
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
  for (const int peer : participants()) {
    const auto& incoming = plan_.receive[peer];
    if (peer != channel_->rank() && incoming.count > 0 && incoming.count <= kInlineBytes)
      std::memcpy(incoming.data, received_header(peer) + sizeof(Signature) + counts_bytes(), incoming.count);
  }
}

void Exchange::wait_for(std::vector<Message>& messages, const char* what) {
  std::string cause;
  for (auto& message : messages) {
    const auto outcome = wait_for(message, cause);
    if (outcome == Channel::Outcome::kLost) throw Absence({message.peer}, false, cause);
    if (outcome == Channel::Outcome::kTimedOut)
      throw Absence({message.peer}, true, c10::str(what, " of rank ", ranks_[message.peer]));
  }
}

Channel::Outcome Exchange::wait_for(Message& message, std::string& cause) {
  using Outcome = Channel::Outcome;
  const auto& watch = channel_->options().watch;
  auto outcome = Outcome::kWoken;
  bool is_announced = false;
  while (outcome == Outcome::kWoken) {
    outcome = channel_->wait(message, deadline_ + kMonitorLimit, cause);
    if (outcome == Outcome::kClosedHere) throw_closed();
    if (outcome != Outcome::kWoken) break;
    check_lost_peers();
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline_) {
      watch->announce({ranks_[message.peer], MissingRank::Reason::kTimedOut});
      outcome = channel_->has_come(message) ? Outcome::kDone : Outcome::kTimedOut;
    } else if (!is_announced && now >= wakes_from()) {
      watch->announce_wait({ranks_[message.peer]});
    } else {
      continue;
    }
    is_announced = true;
  }
  if (is_announced && outcome == Outcome::kDone) watch->withdraw();
  return outcome;
}

// A rank may be gone and yet have sent all that this exchange needs of it.
void Exchange::check_lost_peers() {
  std::vector<int> missing;
  {
    std::lock_guard lock(messages_mutex_);
    TORCH_CHECK(!channel_closes_, call_, ": the process group was destroyed");
    missing = lost_peers_;
  }
  const auto each_of = [&](int peer, const auto& predicate) {
    for (auto* messages : {&header_receives_, &receives_, &sends_})
      for (auto& message : *messages)
        if (message.peer == peer && !predicate(message)) return false;
    return true;
  };
  std::erase_if(missing, [&](int peer) { return each_of(peer, [](const auto& message) { return message.done; }); });
  if (missing.empty()) return;
  const auto& watch = channel_->options().watch;
  watch->announce_ended(channel_->ranks_of(missing)); // before `has_come` closes the connections
  std::erase_if(missing, [&](int peer) { return each_of(peer, [&](auto& message) { return channel_->has_come(message); }); });
  if (!missing.empty()) throw Absence(missing, false, "");
  watch->withdraw();
}

void Exchange::run_second_round(const ExchangePlan& plan) {
  const int tag = kSecondRoundTag | static_cast<int>(signature_.sequence & (kSecondRoundTag - 1));
  std::vector<Message> receives, sends;
  {
    const auto order = channel_->posting_order();
    post_payloads(plan, tag, 0, receives, sends);
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

void Exchange::wake(const std::vector<int>& lost) {
  std::lock_guard lock(messages_mutex_);
  lost_peers_ = lost;
  abort_messages();
}

void Exchange::wake_because_the_channel_closes() {
  std::lock_guard lock(messages_mutex_);
  channel_closes_ = true;
  abort_messages();
}

void Exchange::abort_messages() {
  for (const auto* messages : {&header_receives_, &receives_, &sends_})
    for (const auto& message : *messages) message.work->abort();
}

void Exchange::throw_closed() const {
  const auto failure = channel_->await_failure();
  C10_THROW_ERROR(DistNetworkError, c10::str(call_, ": the group's connections were closed after an earlier failure",
                                             failure.empty() ? "" : ": ", failure));
}

void Exchange::fail(const Absence& absence, bool is_awaited) {
  const auto text = explain(absence, is_awaited);
  failure_ = std::make_exception_ptr(c10::DistNetworkError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
  channel_->fail(text);
}

// A rank is missed only where somebody waits for it.
std::string Exchange::explain(const Absence& absence, bool is_awaited) const {
  if (absence.timed_out) {
    const auto cause = is_awaited ? channel_->options().watch->note_timeout(channel_->ranks_of(absence.peers)) : "";
    return c10::str(call_, ": timed out after ", channel_->options().timeout.count(), " ms, waiting for ", absence.what_happened,
                    cause);
  }
  const auto names = is_awaited ? channel_->blame(absence.peers) : describe_ended(channel_->ranks_of(absence.peers));
  return c10::str(call_, ": lost the connection to ", names, absence.what_happened.empty() ? "" : ". ", absence.what_happened);
}

ExchangeWork::~ExchangeWork() {
  if (channel_->is_forked_copy())
    leave_to_parent(std::move(exchange_)); // which is the one to complete it
  else if (!exchange_->is_completed() && !in_background_)
    channel_->complete_in_background(exchange_);
}

void ExchangeWork::wait() {
  channel_->check_not_forked("a collective that was started before a fork");
  exchange_->wait();
}

bool ExchangeWork::is_completed() {
  if (exchange_->is_completed() || channel_->is_forked_copy()) return exchange_->is_completed();
  // gloo cannot be asked whether a message has come, only be waited for.
  if (!in_background_) channel_->complete_in_background(exchange_);
  in_background_ = true;
  return false;
}

} // namespace tessera::internal::gloo
