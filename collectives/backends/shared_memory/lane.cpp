#include <tessera/collectives/backends/shared_memory/lane.h>

#include <tessera/collectives/backends/shared_memory/memory/segment.h>

#include <ATen/ceil_div.h>

#include <algorithm>
#include <array>

namespace tessera::internal::shared_memory {

namespace {

constexpr int64_t kLine = 128; // processors fetch lines of 64 bytes in pairs

constexpr int64_t kHeaderBytes = sizeof(Signature) + sizeof(int64_t);

} // namespace

/// The counters of one member, the first two in one line: they change together and are polled together.
struct Lane::Words {
  alignas(kLine) std::array<std::atomic<uint64_t>, 2> coming;
  alignas(kLine) std::atomic<uint64_t> finished;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

int64_t LaneShape::slot_bytes() const {
  const auto counts = 2 * members * static_cast<int64_t>(sizeof(int64_t));
  return at::round_up(kHeaderBytes + counts, int64_t{64}) + at::round_up(inline_bytes, kLine);
}

int64_t LaneShape::call_bytes() const {
  const auto without_payload = slot_bytes() - at::round_up(inline_bytes, kLine);
  return senders * at::round_up(slot_bytes(), kLine) + (members - senders) * at::round_up(without_payload, kLine);
}

int64_t LaneShape::bytes() const {
  const auto words = members * static_cast<int64_t>(2 * kLine);
  const auto slots = static_cast<int64_t>(Lane::kSlots) * call_bytes();
  return at::round_up(words + slots, kPage) + senders * static_cast<int64_t>(Lane::kChunks) * chunk_bytes;
}

Lane::Lane(char* memory, Bell& bell, const LaneShape& shape, int self)
    : memory_(memory), bell_(&bell), shape_(shape), self_(self) {
  static_assert(sizeof(Words) == 2 * kLine);
}

std::atomic<uint64_t>& Lane::word(int member, Counter counter) const {
  auto& words = reinterpret_cast<Words*>(memory_)[member];
  return counter == Counter::kFinished ? words.finished : words.coming[static_cast<size_t>(counter)];
}

void Lane::set(Counter counter, uint64_t value) {
  word(self_, counter).store(value);
  if (bell_->has_listeners() && all_have(counter, value)) bell_->ring();
}

bool Lane::all_have(Counter counter, uint64_t value) const {
  for (int member = 0; member < size(); ++member)
    if (word(member, counter).load() < value) return false;
  return true;
}

std::vector<int> Lane::those_behind(Counter counter, uint64_t value) const {
  std::vector<int> behind;
  for (int member = 0; member < size(); ++member)
    if (word(member, counter).load() < value) behind.push_back(member);
  return behind;
}

char* Lane::slot(int member, uint64_t call) const {
  const auto without_payload = shape_.slot_bytes() - at::round_up(shape_.inline_bytes, kLine);
  const auto before = std::min(member, shape_.senders) * at::round_up(shape_.slot_bytes(), kLine) +
                      std::max(0, member - shape_.senders) * at::round_up(without_payload, kLine);
  return memory_ + size() * static_cast<int64_t>(sizeof(Words)) + static_cast<int64_t>(call % kSlots) * shape_.call_bytes() +
         before;
}

Signature& Lane::signature(int member, uint64_t call) const { return *reinterpret_cast<Signature*>(slot(member, call)); }

int64_t& Lane::location(int member, uint64_t call) const {
  return *reinterpret_cast<int64_t*>(slot(member, call) + sizeof(Signature));
}

int64_t* Lane::counts(int member, uint64_t call) const { return reinterpret_cast<int64_t*>(slot(member, call) + kHeaderBytes); }

char* Lane::payload(int member, uint64_t call) const {
  return slot(member, call) + shape_.slot_bytes() - at::round_up(shape_.inline_bytes, kLine);
}

char* Lane::chunk(int member, uint64_t tick) const {
  const auto all = shape_.senders * static_cast<int64_t>(kChunks) * shape_.chunk_bytes;
  const auto place = static_cast<int64_t>(tick % kChunks) * shape_.senders + member;
  return memory_ + shape_.bytes() - all + place * shape_.chunk_bytes;
}

} // namespace tessera::internal::shared_memory
