// The arithmetic of collectives, against LibTorch's in fp64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include <tessera/collectives/sums/block_cache.h>
#include <tessera/collectives/sums/reduce.h>
#include <tessera/collectives/sums/wide_sum.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::reduce_test {
namespace {

using internal::Writes;

torch::Tensor reduced(const std::vector<torch::Tensor>& inputs, ReduceOp op, Writes writes = Writes::kThroughCache) {
  auto output = torch::empty_like(inputs[0]);
  std::vector<const void*> data;
  for (const auto& input : inputs) data.push_back(input.const_data_ptr());
  internal::reduce(output.mutable_data_ptr(), data, output.numel(), output.scalar_type(), op, writes);
  return output;
}

/// In fp64, rounded once.
torch::Tensor expected_of(const std::vector<torch::Tensor>& inputs, ReduceOp op) {
  const auto dtype = inputs[0].scalar_type();
  auto result = inputs[0].to(torch::kDouble);
  for (size_t i = 1; i < inputs.size(); ++i) {
    const auto next = inputs[i].to(torch::kDouble);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: result = result + next; break;
      case ReduceOp::kProduct: result = result * next; break;
      case ReduceOp::kMin: result = torch::minimum(result, next); break;
      case ReduceOp::kMax: result = torch::maximum(result, next); break;
    }
  }
  if (op == ReduceOp::kAvg) result = result / static_cast<double>(inputs.size());
  if (op == ReduceOp::kAvg && !c10::isFloatingType(dtype)) result = result.trunc();
  return result.to(dtype);
}

constexpr std::array kOps{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};

/// Small whole numbers, so that every sum and product is exact in each dtype.
std::vector<torch::Tensor> numbers(int64_t inputs, int64_t numel, at::ScalarType dtype) {
  std::vector<torch::Tensor> result;
  for (int64_t i = 0; i < inputs; ++i) result.push_back(torch::randint(0, 4, {numel}, torch::kLong).to(dtype));
  return result;
}

TEST(Reduce, EveryDtypeAndSize) {
  torch::manual_seed(1);
  const auto block = internal::kWideBlock;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kShort, at::kByte}) {
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{7}, block - 1, block, block + 1, 3 * block + 5}) {
      for (const int64_t inputs : {1, 2, 3, 4}) {
        for (const auto op : kOps) {
          const auto given = numbers(inputs, numel, dtype);
          ASSERT_TRUE(tensors_equal(reduced(given, op), expected_of(given, op)))
              << dtype << ", " << numel << " elements of " << inputs << ", operation " << static_cast<int>(op);
        }
      }
    }
  }
}

TEST(Reduce, OfBoolsIsOrAndAnd) {
  const auto left = torch::tensor({true, true, false, false}), right = torch::tensor({true, false, true, false});
  for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) EXPECT_TENSORS_EQUAL(reduced({left, right}, op), left | right);
  for (const auto op : {ReduceOp::kProduct, ReduceOp::kMin}) EXPECT_TENSORS_EQUAL(reduced({left, right}, op), left & right);
}

/// 256 + 1 + 1 is 258 in fp32, and 256 in bf16 where each sum is rounded.
TEST(Reduce, RoundsShortFloatsOnce) {
  const auto of = [](double value, at::ScalarType dtype) { return torch::full({19}, value, dtype); };
  EXPECT_TENSORS_EQUAL(reduced({of(256, at::kBFloat16), of(1, at::kBFloat16), of(1, at::kBFloat16)}, ReduceOp::kSum),
                       of(258, at::kBFloat16));
  EXPECT_TENSORS_EQUAL(reduced({of(2048, at::kHalf), of(1, at::kHalf), of(1, at::kHalf)}, ReduceOp::kSum), of(2050, at::kHalf));
  EXPECT_TENSORS_EQUAL(reduced({of(60000, at::kHalf), of(60000, at::kHalf)}, ReduceOp::kAvg), of(60000, at::kHalf));
}

TEST(Reduce, KeepsANaNOfAnyInput) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto left = torch::tensor({nan, 1.0, 2.0}).to(dtype), right = torch::tensor({1.0, nan, 3.0}).to(dtype);
    for (const auto op : kOps) {
      const auto is_nan = reduced({left, right}, op).isnan();
      EXPECT_TENSORS_EQUAL(is_nan, torch::tensor({true, true, false}));
    }
  }
}

TEST(Reduce, MayWriteOverAnInputAndPastTheCaches) {
  torch::manual_seed(2);
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const auto writes : {Writes::kThroughCache, Writes::kPastCache}) {
      for (const size_t written : {0, 1, 2}) {
        auto inputs = numbers(3, 5000, dtype);
        const auto expected = expected_of(inputs, ReduceOp::kSum);
        std::vector<const void*> data;
        for (const auto& input : inputs) data.push_back(input.const_data_ptr());
        internal::reduce(inputs[written].mutable_data_ptr(), data, 5000, dtype, ReduceOp::kSum, writes);
        EXPECT_TENSORS_EQUAL(inputs[written], expected);
      }
    }
  }
}

TEST(Reduce, AddsUpInTheOrderOfTheInputs) {
  const auto of = [](float value) { return torch::full({33}, value); };
  EXPECT_TENSORS_EQUAL(reduced({of(1e8F), of(-1e8F), of(1)}, ReduceOp::kSum), of(1));
  EXPECT_TENSORS_EQUAL(reduced({of(1), of(1e8F), of(-1e8F)}, ReduceOp::kSum), of(0));
}

TEST(BlockCache, HandsTheSameBlockOutAgain) {
  internal::BlockCache cache(torch::kCPU);
  auto first = cache.allocate(1000);
  const void* const address = first.get();
  EXPECT_EQ(cache.cached_bytes(), 0);
  first.clear();
  EXPECT_EQ(cache.cached_bytes(), 1000);
  const auto again = cache.allocate(900), other = cache.allocate(900);
  EXPECT_EQ(again.get(), address);
  EXPECT_NE(other.get(), address);
  EXPECT_EQ(cache.cached_bytes(), 0);
}

TEST(BlockCache, ASmallRequestLeavesALargeBlock) {
  internal::BlockCache cache(torch::kCPU);
  cache.allocate(1 << 20);
  const auto small = cache.allocate(16);
  EXPECT_EQ(cache.cached_bytes(), 1 << 20);
}

TEST(BlockCache, MayEndBeforeItsBlocks) {
  c10::DataPtr block;
  {
    internal::BlockCache cache(torch::kCPU);
    block = cache.allocate(64);
  }
  std::memset(block.get(), 1, 64);
}

TEST(BlockCache, TakesRequestsForNothing) {
  internal::BlockCache cache(torch::kCPU);
  cache.allocate(0).clear();
  EXPECT_EQ(cache.cached_bytes(), 0);
}

} // namespace
} // namespace tessera::testing::reduce_test
