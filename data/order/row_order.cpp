#include <tessera/data/order/row_order.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace tessera::internal {

namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

uint64_t lowest(uint64_t value, int bits) { return value & ((uint64_t{1} << bits) - 1); }

} // namespace

ComputedPermutation::ComputedPermutation(int64_t n, uint64_t seed) : n_(static_cast<uint64_t>(n)) {
  const int bits = std::max(2, static_cast<int>(std::bit_width(n_ - 1)));
  low_bits_ = bits / 2;
  high_bits_ = bits - low_bits_;
  for (auto& key : keys_) key = seed = mixed(seed);
}

uint64_t ComputedPermutation::encrypt(uint64_t value) const {
  int low_bits = low_bits_, high_bits = high_bits_;
  uint64_t low = lowest(value, low_bits), high = value >> low_bits;
  for (const auto key : keys_) {
    const auto changed = high ^ lowest(mixed(low ^ key), high_bits);
    high = low;
    low = changed;
    std::swap(low_bits, high_bits);
  }
  return (high << low_bits) | low;
}

int64_t ComputedPermutation::operator[](int64_t place) const {
  auto value = static_cast<uint64_t>(place);
  do value = encrypt(value);
  while (value >= n_);
  return static_cast<int64_t>(value);
}

RowOrder RowOrder::drawn(int64_t rows, uint64_t seed) {
  const auto permutation = at::randperm(rows, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  const auto* first = permutation.const_data_ptr<int64_t>();
  RowOrder order;
  order.order_ = std::vector<int64_t>(first, first + rows);
  return order;
}

RowOrder RowOrder::computed(int64_t rows, uint64_t seed) {
  RowOrder order;
  order.order_ = ComputedPermutation(rows, seed);
  return order;
}

int64_t RowOrder::operator[](int64_t place) const {
  if (const auto* drawn = std::get_if<std::vector<int64_t>>(&order_)) return (*drawn)[static_cast<size_t>(place)];
  if (const auto* computed = std::get_if<ComputedPermutation>(&order_)) return (*computed)[place];
  return place;
}

} // namespace tessera::internal
