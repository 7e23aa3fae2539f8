// Memory: copies past the caches, whole pages, blocks that are used again, tensors over memory that is there.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/current_stream.h>
#include <tessera/base/free_blocks.h>
#include <tessera/base/output_guard.h>
#include <tessera/base/stream_copy.h>
#include <tessera/base/tensor_over.h>

#include <tessera/tests/support/matchers.h>

namespace tessera::testing::memory_test {
namespace {

using internal::FreeBlocks;
using internal::Writes;

/// Every begin within a cache line, and lengths around lines and around where the way of the copy changes.
TEST(StreamCopy, CopiesThatAndNothingElse) {
  constexpr int64_t kMost = 3 * 4096;
  std::vector<uint8_t> from(kMost + 128), to(from.size());
  std::iota(from.begin(), from.end(), uint8_t{1});
  for (const auto writes : {Writes::kThroughCache, Writes::kPastCache}) {
    for (const int64_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 4159, 8192, 12288}) {
      for (const int64_t begin : {0, 1, 15, 16, 63}) {
        for (const int64_t source : {0, 1, 32}) {
          std::fill(to.begin(), to.end(), uint8_t{0});
          internal::copy(to.data() + begin, from.data() + source, bytes, writes);
          ASSERT_EQ(std::memcmp(to.data() + begin, from.data() + source, static_cast<size_t>(bytes)), 0)
              << bytes << " to " << begin;
          const auto written = std::count_if(to.begin(), to.end(), [](uint8_t byte) { return byte != 0; });
          const auto* const copied = from.data() + source;
          ASSERT_EQ(written, bytes - std::count(copied, copied + bytes, uint8_t{0})) << bytes << " to " << begin;
        }
      }
    }
  }
}

TEST(StreamCopy, OfATensorOntoItselfDoesNothing) {
  std::vector<uint8_t> bytes(8192, 3);
  internal::copy(bytes.data(), bytes.data(), 8192, Writes::kPastCache);
  EXPECT_EQ(bytes, std::vector<uint8_t>(8192, 3));
  EXPECT_EQ(internal::writes_of((int64_t{2} << 20) - 1), Writes::kThroughCache);
  EXPECT_EQ(internal::writes_of(int64_t{2} << 20), Writes::kPastCache);
}

TEST(FreeBlocks, GivesTheSmallestThatFits) {
  FreeBlocks<std::shared_ptr<int>> blocks;
  const auto small = std::make_shared<int>(1), large = std::make_shared<int>(2);
  blocks.add(200, large);
  blocks.add(100, small);
  EXPECT_EQ(blocks.bytes(), 300);
  EXPECT_EQ(blocks.take(90), std::pair(int64_t{100}, small));
  EXPECT_EQ(blocks.take(90), std::pair(int64_t{200}, large));
  EXPECT_EQ(blocks.bytes(), 0);
}

TEST(FreeBlocks, OfOneMuchLargerKeepsIt) {
  FreeBlocks<std::shared_ptr<int>> blocks;
  blocks.add(401, std::make_shared<int>(1));
  EXPECT_EQ(blocks.take(100), std::pair(int64_t{100}, std::shared_ptr<int>()));
  EXPECT_EQ(blocks.bytes(), 401);
  EXPECT_EQ(blocks.take(101).first, 401); // at most four times as large
}

TEST(FreeBlocks, LetsASmallerOneGoWhereNoneFits) {
  FreeBlocks<std::shared_ptr<int>> blocks;
  const auto smaller = std::make_shared<int>(1);
  blocks.add(10, std::make_shared<int>(0));
  blocks.add(20, smaller);
  EXPECT_EQ(blocks.take(30).second, nullptr);
  EXPECT_EQ(smaller.use_count(), 1); // the largest of them is gone
  EXPECT_EQ(blocks.bytes(), 10);
}

TEST(AlignedMemory, IsOfWholePages) {
  for (const int64_t bytes : {int64_t{1}, internal::kPageBytes, internal::kPageBytes + 1, int64_t{3} << 20}) {
    const auto memory = internal::aligned_memory(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % internal::kPageBytes, 0);
    EXPECT_EQ(static_cast<int64_t>(memory.nbytes()), internal::whole_pages(bytes));
    std::memset(memory.mutable_data(), 1, memory.nbytes());
  }
  EXPECT_EQ(internal::whole_pages(0), 0);
}

TEST(AlignedMemory, FromThePageThatBeginsInAStorage) {
  const auto bytes = torch::empty({3 * internal::kPageBytes}, torch::kByte);
  const auto page = internal::from_page(bytes.storage(), internal::kPageBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(page.data_ptr()) % internal::kPageBytes, 0);
  EXPECT_EQ(page.numel(), internal::kPageBytes);
  EXPECT_LT(page.storage_offset(), internal::kPageBytes);
}

TEST(TensorOver, IsNoViewOfAnother) {
  const auto base = torch::arange(6, torch::kFloat);
  const auto version = base._version();
  const auto rows = internal::tensor_over(base.storage(), 4, {2, 2}, torch::kFloat);
  EXPECT_TENSORS_EQUAL(rows, torch::tensor({{1.0F, 2.0F}, {3.0F, 4.0F}}));
  const auto columns = internal::tensor_over(base.storage(), 0, {2, 3}, torch::kFloat, {}, {1, 2});
  EXPECT_TENSORS_EQUAL(columns, torch::tensor({{0.0F, 2.0F, 4.0F}, {1.0F, 3.0F, 5.0F}}));
  rows.fill_(9);
  EXPECT_EQ(base._version(), version);
  EXPECT_TENSORS_EQUAL(base, torch::tensor({0.0F, 9.0F, 9.0F, 9.0F, 9.0F, 5.0F}));
  EXPECT_EQ(internal::tensor_over(base.storage(), 0, {0, 3}, torch::kFloat).numel(), 0);
}

TEST(OutputGuard, LetsParametersAndInferenceTensorsBeWritten) {
  const auto parameter = torch::ones({2}, torch::requires_grad());
  {
    const internal::OutputGuard guard(parameter);
    parameter.add_(1);
    EXPECT_FALSE(c10::InferenceMode::is_enabled());
  }
  EXPECT_TRUE(torch::GradMode::is_enabled());
  torch::Tensor inference;
  {
    const c10::InferenceMode mode;
    inference = torch::ones({2});
    const internal::OutputGuard guard(parameter);
    parameter.add_(1); // is counted, as no write in this mode is
  }
  EXPECT_EQ(parameter._version(), 2);
  EXPECT_TENSORS_EQUAL(parameter.detach(), torch::full({2}, 3.0F));
  {
    const internal::OutputGuard guard(inference);
    inference.add_(1);
  }
  EXPECT_TENSORS_EQUAL(inference, torch::full({2}, 2.0F));
  const internal::OutputGuard none{torch::Tensor()};
  EXPECT_FALSE(torch::GradMode::is_enabled());
}

TEST(CurrentStream, IsNoneWhereOperatorsRunAtOnce) {
  EXPECT_FALSE(internal::is_asynchronous(torch::kCPU));
  EXPECT_FALSE(internal::is_asynchronous(torch::kMeta));
  EXPECT_FALSE(internal::current_stream_if_any(torch::kCPU));
}

} // namespace
} // namespace tessera::testing::memory_test
