#include <tessera/collectives/trace/flight_recorder.h>

#include <c10/util/Exception.h>

#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

namespace {

struct ThreadId {
  const int64_t value = syscall(SYS_gettid);
};
constinit PerThread<ThreadId> this_thread;

bool has_rank(const RecordedGroup& group, int rank) { return rank >= 0 && rank < static_cast<int>(group.ranks.size()); }

/// How many calls came before this one that it could be taken for; null for a message from or to no rank.
int64_t* counter_of(RecordedGroup& group, CollectiveKind kind, int peer) {
  const bool sends = kind == CollectiveKind::kSend;
  if (!sends && kind != CollectiveKind::kReceive) return &group.issued;
  if (!has_rank(group, peer)) return nullptr;
  return &(sends ? group.messages[{group.rank, peer}] : group.messages[{peer, group.rank}]);
}

} // namespace

const char* to_string(RecordedCall::State state) {
  switch (state) {
    case RecordedCall::State::kIssued: return "issued";
    case RecordedCall::State::kAwaited: return "awaited";
    case RecordedCall::State::kDone: return "done";
    case RecordedCall::State::kFailed: return "failed";
    case RecordedCall::State::kRefused: return "refused";
  }
  return "unknown";
}

FlightRecorder::FlightRecorder(size_t capacity) : ring_(capacity) {
  TORCH_CHECK(capacity > 0, "a flight recorder needs room for a call");
}

int FlightRecorder::add_group(RecordedGroup group) {
  if (fork_depth() != fork_depth_) return -1;
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const auto& other) {
    return other.name == group.name && other.device == group.device && other.ranks == group.ranks;
  });
  const auto index = static_cast<int>(found - groups_.begin());
  if (found == groups_.end()) groups_.push_back(std::move(group));
  return index;
}

RecordedCall& FlightRecorder::next(int group) {
  auto& call = ring_[issued_ % ring_.size()];
  call.number = issued_++;
  call.group = group;
  call.thread = this_thread->value;
  call.state = RecordedCall::State::kIssued;
  call.issued = now_in_ticks();
  call.awaited = call.ended = 0;
  call.label.clear();
  call.failure.clear();
  return call;
}

uint64_t FlightRecorder::issue(const Call& call) {
  if (fork_depth() != fork_depth_) return 0; // the mutex may be locked for ever
  const std::lock_guard lock(mutex_);
  auto& recorded = next(call.group);
  recorded.is_connect = false;
  recorded.kind = call.kind;
  auto& group = groups_[static_cast<size_t>(call.group)];
  auto* const counter = counter_of(group, call.kind, call.peer);
  recorded.sequence = counter != nullptr ? (*counter)++ : -1;
  recorded.op = call.op;
  recorded.peer = has_rank(group, call.peer) ? call.peer : -1; // no other is asked for, unless the call is refused
  recorded.dtype = call.dtype;
  recorded.bytes = call.bytes;
  recorded.label = call.label;
  return recorded.number;
}

uint64_t FlightRecorder::connect(int group) {
  if (fork_depth() != fork_depth_) return 0;
  const std::lock_guard lock(mutex_);
  auto& recorded = next(group);
  recorded.is_connect = true;
  recorded.sequence = recorded.peer = -1;
  recorded.state = RecordedCall::State::kAwaited;
  recorded.awaited = recorded.issued;
  return recorded.number;
}

RecordedCall* FlightRecorder::find(uint64_t number) {
  auto& call = ring_[number % ring_.size()];
  return number < issued_ && call.number == number ? &call : nullptr;
}

void FlightRecorder::await(uint64_t number) {
  if (fork_depth() != fork_depth_) return;
  const std::lock_guard lock(mutex_);
  auto* const call = find(number);
  if (call == nullptr || call->state != RecordedCall::State::kIssued) return;
  call->state = RecordedCall::State::kAwaited;
  call->awaited = now_in_ticks();
}

void FlightRecorder::close(uint64_t number, RecordedCall::State state, std::string failure) {
  if (fork_depth() != fork_depth_) return;
  const std::lock_guard lock(mutex_);
  auto* const call = find(number);
  if (call == nullptr || call->state == RecordedCall::State::kFailed) return;
  if (call->ended == 0) call->ended = now_in_ticks();
  call->state = state;
  call->failure = std::move(failure);
  if (state != RecordedCall::State::kRefused || call->sequence < 0) return;
  auto* const counter = counter_of(groups_[static_cast<size_t>(call->group)], call->kind, call->peer);
  if (*counter == call->sequence + 1) *counter = call->sequence;
  call->sequence = -1;
}

void FlightRecorder::end(uint64_t number) { close(number, RecordedCall::State::kDone, {}); }

void FlightRecorder::fail(uint64_t number, std::string failure) {
  close(number, RecordedCall::State::kFailed, std::move(failure));
}

void FlightRecorder::refuse(uint64_t number, std::string failure) {
  close(number, RecordedCall::State::kRefused, std::move(failure));
}

FlightRecorder::Snapshot FlightRecorder::snapshot() const {
  if (fork_depth() != fork_depth_) return {};
  const std::lock_guard lock(mutex_);
  const auto used = static_cast<std::ptrdiff_t>(std::min<uint64_t>(issued_, ring_.size()));
  const auto oldest = issued_ > ring_.size() ? static_cast<std::ptrdiff_t>(issued_ % ring_.size()) : 0;
  Snapshot taken{groups_, {ring_.begin(), ring_.begin() + used}, issued_, begin_, Moment::now()};
  std::rotate(taken.calls.begin(), taken.calls.begin() + oldest, taken.calls.end());
  return taken;
}

} // namespace tessera::internal
