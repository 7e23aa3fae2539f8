#include <tessera/base/meta_memory.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

namespace tessera::testing::meta_memory_test {
namespace {

using internal::MemoryUse, internal::MemoryUseScope, internal::MetaMemory;
using Kind = MetaMemory::Event::Kind;

thread_local uint8_t phase = 0;
uint8_t phase_of_test() { return phase; }
torch::Tensor on_meta(int64_t bytes) { return torch::empty({bytes}, torch::TensorOptions(torch::kByte).device(torch::kMeta)); }

int64_t held(const MetaMemory& memory) {
  int64_t bytes = 0;
  for (const auto& event : memory.events())
    bytes += event.kind == Kind::kBegin ? event.bytes : event.kind == Kind::kEnd ? -event.bytes : 0;
  return bytes;
}

TEST(MetaMemory, NotesBlocksAndTheirEnds) {
  const MetaMemory memory(phase_of_test);
  phase = 3;
  auto first = on_meta(100);
  const auto view = first.view({10, 10});
  EXPECT_EQ(held(memory), 100);
  {
    const MemoryUseScope use(MemoryUse::kUnsharded);
    const auto second = on_meta(50);
    EXPECT_EQ(held(memory), 150);
    EXPECT_EQ(memory.events().back().use, MemoryUse::kUnsharded);
    EXPECT_EQ(memory.events().back().phase, 3);
  }
  EXPECT_EQ(held(memory), 100);
  first = torch::Tensor();
  EXPECT_EQ(held(memory), 100) << "the view holds it";
  EXPECT_EQ(memory.count(), 3U);
  EXPECT_EQ(on_meta(0).numel(), 0);
  EXPECT_EQ(memory.count(), 3U) << "nothing takes no block";
  phase = 0;
}

TEST(MetaMemory, SeesResultsOfOperators) {
  const auto before = torch::empty({8, 8}, torch::kMeta);
  const MetaMemory memory(phase_of_test);
  const auto product = torch::matmul(before, before);
  EXPECT_EQ(held(memory), 8 * 8 * 4);
  const auto sum = (product + 1).to(torch::kBFloat16);
  EXPECT_EQ(held(memory), 8 * 8 * (4 + 2)) << "what was before is no part of the log, and what ended has gone";
}

TEST(MetaMemory, MayEndBeforeItsBlocks) {
  torch::Tensor longer;
  {
    const MetaMemory memory(phase_of_test);
    longer = on_meta(10);
  }
  longer = torch::Tensor();
  const auto unseen = on_meta(10);
  const MetaMemory memory(phase_of_test);
  EXPECT_EQ(held(memory), 0);
}

TEST(MetaMemory, IsOfOneThread) {
  const MetaMemory memory(phase_of_test);
  torch::Tensor ours = on_meta(7);
  std::thread([&] {
    const auto theirs = on_meta(1000);
    ours = torch::Tensor();
  }).join();
  EXPECT_EQ(held(memory), 0) << "a block may end on any thread";
  EXPECT_EQ(memory.count(), 2U);
}

TEST(MetaMemory, KnowsWhatABlockIsForNow) {
  const MetaMemory memory(phase_of_test);
  const auto block = c10::GetAllocator(c10::kMeta)->allocate(30);
  internal::use_meta_block(block, MemoryUse::kCached);
  ASSERT_EQ(memory.count(), 2U);
  EXPECT_EQ(memory.events()[1].use, MemoryUse::kCached);
  EXPECT_EQ(memory.events()[1].block, memory.events()[0].block);
  const auto other = c10::GetAllocator(c10::kCPU)->allocate(30);
  internal::use_meta_block(other, MemoryUse::kCached);
  EXPECT_EQ(memory.count(), 2U);
}

} // namespace
} // namespace tessera::testing::meta_memory_test
