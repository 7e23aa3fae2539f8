// Tests that fail on purpose: lockstep_test runs them one at a time and looks at what the fixture reports.
#include <gtest/gtest.h>
#include <tessera/collectives/process_context.h>

#include <numeric>
#include <stdexcept>

namespace tessera {
namespace {

int rank() { return process_context().rank(); }

CommunicatorPtr world() {
  std::vector<int64_t> ranks(process_context().world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return process_context().communicator(ranks, at::kCPU);
}

TEST(Fails, ExpectationOnRank1) { EXPECT_NE(rank(), 1) << "rank one expects more"; }
TEST(Fails, ExpectationOnEveryRank) { EXPECT_EQ(rank(), 99) << "everybody fails"; }

TEST(Fails, AssertionOnRank1BeforeABarrier) {
  ASSERT_NE(rank(), 1) << "rank one leaves";
  world()->barrier("without rank 1");
}

TEST(Fails, ExceptionOnRank1) {
  if (rank() == 1) throw std::runtime_error("rank one throws");
  world()->barrier("without rank 1");
}

TEST(Passes, AfterAll) { world()->barrier("all"); }

} // namespace
} // namespace tessera
