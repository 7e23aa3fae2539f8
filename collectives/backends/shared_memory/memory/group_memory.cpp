#include <tessera/collectives/backends/shared_memory/memory/group_memory.h>

#include <ATen/ceil_div.h>

namespace tessera::internal::shared_memory {

namespace {

constexpr int64_t kKibi = 1024;

int64_t control_bytes(int ranks) {
  return at::round_up(static_cast<int64_t>(sizeof(Bell)) + ranks * static_cast<int64_t>(sizeof(uint32_t)), kPage);
}

} // namespace

GroupShape GroupShape::of(int ranks, bool share_cores) {
  const int64_t chunk = share_cores ? 1024 * kKibi : 256 * kKibi;
  return {ranks, {ranks, 16 * kKibi, chunk}, {2, 256 * kKibi, 128 * kKibi, 1}};
}

int64_t GroupShape::reserved_bytes() const { return control_bytes(ranks) + all.bytes(); }

int64_t GroupShape::bytes() const { return reserved_bytes() + int64_t{ranks} * ranks * pair.bytes(); }

std::atomic<uint32_t>& GroupMemory::presence(int rank) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(segment_.data() + sizeof(Bell))[rank];
}

Lane GroupMemory::lane_of_all(int self) const {
  return {segment_.data() + control_bytes(shape_.ranks), bell(), shape_.all, self};
}

Lane GroupMemory::lane_of_pair(int from, int to, int self) const {
  const auto offset = shape_.reserved_bytes() + (int64_t{from} * shape_.ranks + to) * shape_.pair.bytes();
  segment_.reserve(offset, shape_.pair.bytes());
  return {segment_.data() + offset, bell(), shape_.pair, self == from ? 0 : 1};
}

void GroupMemory::leave(int self) const {
  presence(self).store(1);
  if (bell().has_listeners()) bell().ring();
}

} // namespace tessera::internal::shared_memory
