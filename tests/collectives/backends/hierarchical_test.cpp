// Groups over several hosts: which of them run hierarchically, and that what they move in many chunks is right.
#include <tessera/tests/support/hosts.h>
#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/backends/hierarchical/host_layout.h>
#include <tessera/collectives/process_context.h>
#include <torch/torch.h>

#include <gmock/gmock.h>

#include <numeric>

namespace tessera::hierarchical_test {
namespace {

using internal::hierarchical::HostLayout;
using ::testing::ElementsAre;

TEST(HostLayout, RanksOfAHostAreOrderedAsInTheGroup) {
  const auto layout = HostLayout::of({0, 1, 1, 0}, 2);
  ASSERT_TRUE(layout);
  EXPECT_THAT(layout->places, ElementsAre(ElementsAre(0, 3), ElementsAre(1, 2)));
  EXPECT_EQ(layout->host, 1);
  EXPECT_EQ(layout->column, 1);
  EXPECT_EQ(layout->own_place(), 2);
  EXPECT_THAT(layout->column_places(0), ElementsAre(0, 1));
  EXPECT_EQ(layout->find(3), std::pair(0, 1));
}

TEST(HostLayout, OthersAreLeftToGloo) {
  EXPECT_FALSE(HostLayout::of({}, 0));
  EXPECT_FALSE(HostLayout::of({0, 0, 0, 0}, 1)) << "one host";
  EXPECT_FALSE(HostLayout::of({0, 1, 2}, 1)) << "a rank on each host";
  EXPECT_FALSE(HostLayout::of({0, 0, 1}, 2)) << "not as many on each host";
}

/// The group of all ranks of this job, which TESSERA_TEST_HOSTS puts on hosts.
class OverHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::simulated_hosts().empty()) GTEST_SKIP() << "the ranks are on one host";
    std::vector<int64_t> ranks(process_context().world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
    group = process_context().communicator(ranks, at::kCPU, "over hosts");
  }

  at::Tensor numbers(int64_t count, int rank) const { return torch::arange(count, torch::kFloat).remainder(1000).add(rank); }
  int64_t sum_of_ranks() const { return int64_t{group->size()} * (group->size() - 1) / 2; }

  CommunicatorPtr group;
  const int64_t many = (5 << 20) + 3; // elements: more chunks than are on the wire at once, and no multiple of anything
};

TEST_F(OverHosts, AnAllReduceInManyChunks) {
  auto tensor = numbers(many, group->rank());
  group->all_reduce(tensor, ReduceOp::kSum, "many").wait();
  EXPECT_TENSORS_EQUAL(tensor, numbers(many, 0) * group->size() + sum_of_ranks());
}

TEST_F(OverHosts, AReduceScatterInManyChunks) {
  const int64_t own = many / 2;
  auto output = torch::empty({own});
  group->reduce_scatter(output, numbers(own * group->size(), group->rank()), ReduceOp::kSum, "many").wait();
  const auto expected = numbers(own * group->size(), 0) * group->size() + sum_of_ranks();
  EXPECT_TENSORS_EQUAL(output, expected.narrow(0, group->rank() * own, own));
}

TEST_F(OverHosts, AnAllGatherInManyChunks) {
  const int64_t own = many / 2;
  auto output = torch::empty({group->size() * own});
  group->all_gather_into(output, numbers(own, group->rank()), "many").wait();
  for (int rank = 0; rank < group->size(); ++rank)
    EXPECT_TENSORS_EQUAL(output.narrow(0, rank * own, own), numbers(own, rank)) << rank;
}

TEST_F(OverHosts, ABroadcastInManyChunksFromEveryRank) {
  for (int root = 0; root < group->size(); ++root) {
    auto tensor = numbers(many, group->rank());
    group->broadcast(tensor, root, "many").wait();
    EXPECT_TENSORS_EQUAL(tensor, numbers(many, root)) << root;
  }
}

TEST_F(OverHosts, MessagesBetweenAnyTwoRanksDoNotWaitForCollectives) {
  auto reduced = numbers(many, group->rank());
  auto work = group->all_reduce(reduced, ReduceOp::kSum, "beside messages");
  for (int from = 0; from < group->size(); ++from) {
    for (int to = 0; to < group->size(); ++to) {
      if (from == to) continue;
      auto message = numbers(1000, group->rank());
      if (group->rank() == from) group->send(message, to, "message").wait();
      if (group->rank() != to) continue;
      group->receive(message, from, "message").wait();
      EXPECT_TENSORS_EQUAL(message, numbers(1000, from)) << from << " to " << to;
    }
  }
  work.wait();
  EXPECT_TENSORS_EQUAL(reduced, numbers(many, 0) * group->size() + sum_of_ranks());
}

TEST_F(OverHosts, AllRanksGetTheSameBitsOfASum) {
  torch::manual_seed(group->rank());
  auto tensor = torch::randn({many});
  group->all_reduce(tensor, ReduceOp::kAvg, "random").wait();
  auto first = tensor.clone();
  group->broadcast(first, 0, "of rank 0").wait();
  EXPECT_TENSORS_EQUAL(tensor, first);
}

TEST_F(OverHosts, EveryRankIsToldWhatAllHaveCalled) {
  auto tensor = numbers(many, 0), output = torch::empty({many * group->size()});
  const bool is_last = group->rank() == group->size() - 1;
  auto own = process_context().communicator(group->ranks(), at::kCPU, "mismatch");
  auto work = is_last ? own->all_gather_into(output, tensor, "one") : own->all_reduce(tensor, ReduceOp::kSum, "other");
  EXPECT_THROWS_WITH(work.wait(), c10::str("the ranks of the group called different collectives:\n  rank 0: all_reduce 'other' (",
                                           many * 4, " bytes of Float, sum, call 0)"));
  EXPECT_THROWS_WITH(work.wait(), c10::str("rank ", group->size() - 1, ": all_gather 'one' (", many * 4 * group->size()));
  EXPECT_THROWS_WITH(own->all_reduce(tensor, ReduceOp::kSum, "next"), "the group cannot be used after an earlier failure");
}

/// Calls with steps in other orders, each on tensors of its own. `kind` up to 4.
Work call_of(Communicator& own, int kind, torch::Tensor& tensor, torch::Tensor& whole) {
  switch (kind) {
    case 0: return own.all_gather_into(whole, tensor, "gather");
    case 1: return own.reduce_scatter(tensor, whole, ReduceOp::kSum, "reduction");
    case 2: return own.all_reduce(tensor, ReduceOp::kSum, "sum");
    case 3: return own.all_reduce(whole, ReduceOp::kSum, "sum");
    default: return own.broadcast(tensor, 0, "from 0");
  }
}

TEST_F(OverHosts, DifferentCallsEndOnAllRanksAndSumNothing) {
  const int64_t several = 300'000; // elements: two chunks and a part of one
  for (int pair = 0; pair < 25; ++pair) {
    const int kinds[] = {pair / 5, pair % 5}, odd = pair % 2 == 0 ? group->size() - 1 : 0;
    if (kinds[0] == kinds[1]) continue;
    SCOPED_TRACE(c10::str("rank ", odd, " calls ", kinds[1], ", the others ", kinds[0]));
    auto own = process_context().communicator(group->ranks(), at::kCPU, c10::str("mismatch ", pair));
    auto tensor = numbers(several, 0), whole = numbers(several * group->size(), 0);
    const int kind = kinds[group->rank() == odd ? 1 : 0];
    auto work = call_of(*own, kind, tensor, whole);
    EXPECT_THROWS_WITH(work.wait(), "the ranks of the group called different collectives:\n  rank 0: ");
    if (kind == 1 || kind == 2) EXPECT_TENSORS_EQUAL(tensor, numbers(several, 0));
    if (kind == 3) EXPECT_TENSORS_EQUAL(whole, numbers(several * group->size(), 0));
  }
}

TEST_F(OverHosts, CountersHaveTheFullBufferOnce) {
  group->counters().reset();
  auto tensor = numbers(many, 0);
  group->all_reduce(tensor, ReduceOp::kSum, "counted").wait();
  group->barrier("counted");
  EXPECT_EQ(group->counters().get(CollectiveKind::kAllReduce), (CollectiveCounters::Count{1, many * 4}));
  EXPECT_EQ(group->counters().get(CollectiveKind::kBarrier), (CollectiveCounters::Count{1, 0}));
  EXPECT_EQ(group->counters().get(CollectiveKind::kReduceScatter), (CollectiveCounters::Count{0, 0}));
}

} // namespace
} // namespace tessera::hierarchical_test
