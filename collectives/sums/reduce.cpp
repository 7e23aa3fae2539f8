#include <tessera/collectives/sums/reduce.h>

#include <tessera/collectives/sums/wide_sum.h>

#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

namespace tessera::internal {

namespace {

// Small enough for the accumulator to stay in the first-level cache, and the inputs to be read once.
constexpr int64_t kBlock = kWideBlock;

template <typename T>
constexpr bool kReducedFloat = std::is_same_v<T, at::BFloat16> || std::is_same_v<T, at::Half>;

template <typename T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

template <typename T, typename Combine>
void accumulate(T* accumulator, const auto* input, int64_t count, const Combine& combine) {
  for (int64_t i = 0; i < count; ++i) accumulator[i] = combine(accumulator[i], static_cast<T>(input[i]));
}

template <typename T>
void accumulate(T* accumulator, const auto* input, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return accumulate(accumulator, input, count, [](T a, T b) { return static_cast<T>(a + b); });
    case ReduceOp::kProduct: return accumulate(accumulator, input, count, [](T a, T b) { return static_cast<T>(a * b); });
    // A NaN on any rank stays.
    case ReduceOp::kMin: return accumulate(accumulator, input, count, [](T a, T b) { return a < b || is_nan(a) ? a : b; });
    case ReduceOp::kMax: return accumulate(accumulator, input, count, [](T a, T b) { return a > b || is_nan(a) ? a : b; });
  }
}

template <typename T, typename Accumulator>
void reduce_block(T* output, const std::vector<const void*>& inputs, int64_t offset, int64_t count, ReduceOp op) {
  std::array<Accumulator, kBlock> accumulator;
  const auto* first = static_cast<const T*>(inputs[0]) + offset;
  std::copy(first, first + count, accumulator.begin());
  for (size_t i = 1; i < inputs.size(); ++i) accumulate(accumulator.data(), static_cast<const T*>(inputs[i]) + offset, count, op);
  if (op == ReduceOp::kAvg) {
    const auto ranks = static_cast<Accumulator>(inputs.size());
    for (int64_t i = 0; i < count; ++i) accumulator[i] = accumulator[i] / ranks;
  }
  std::copy(accumulator.begin(), accumulator.begin() + count, output + offset);
}

/// `run(offset, count)` for each block.
template <typename Run>
void for_each_block(int64_t numel, const Run& run) {
  const auto blocks = (numel + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
    for (auto block = begin; block < end; ++block) run(block * kBlock, std::min(kBlock, numel - block * kBlock));
  });
}

template <typename T, typename Accumulator>
void reduce_all(T* output, const std::vector<const void*>& inputs, int64_t numel, ReduceOp op) {
  for_each_block(numel, [&](int64_t offset, int64_t count) { reduce_block<T, Accumulator>(output, inputs, offset, count, op); });
}

} // namespace

void reduce(void* output, const std::vector<const void*>& inputs, int64_t numel, c10::ScalarType dtype, ReduceOp op,
            Writes writes) {
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  if (const auto sum = is_sum && inputs.size() > 1 ? wide_sum_for(dtype) : nullptr) {
    const auto divisor = op == ReduceOp::kAvg ? static_cast<float>(inputs.size()) : 1;
    return for_each_block(numel, [&](int64_t offset, int64_t count) { sum(output, inputs, offset, count, divisor, writes); });
  }
  if (dtype == at::kBool) { // sum is "or", product is "and"
    const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
    return reduce_all<bool, bool>(static_cast<bool*>(output), inputs, numel, any ? ReduceOp::kMax : ReduceOp::kMin);
  }
  AT_DISPATCH_V2(dtype, "tessera::reduce", AT_WRAP([&] {
                   using Accumulator = std::conditional_t<kReducedFloat<scalar_t>, float, scalar_t>;
                   reduce_all<scalar_t, Accumulator>(static_cast<scalar_t*>(output), inputs, numel, op);
                 }),
                 at::kBFloat16, at::kHalf, AT_EXPAND(AT_ALL_TYPES));
}

} // namespace tessera::internal
