#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/backends/store_communicator.h>
#include <tessera/collectives/process_context.h>

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>

namespace tessera::internal::store_communicator_test {
namespace {

StoreGroup group_of(const std::string& name, std::vector<int64_t> ranks) {
  StoreGroup group;
  group.store = c10::make_intrusive<c10d::PrefixStore>(name, process_context().store());
  group.name = name;
  const auto own = std::find(ranks.begin(), ranks.end(), process_context().rank());
  group.rank = static_cast<int>(own - ranks.begin());
  group.ranks = std::move(ranks);
  group.options = process_context().options();
  return group;
}

std::vector<int64_t> all_ranks() {
  std::vector<int64_t> ranks(static_cast<size_t>(process_context().world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

int64_t sum_of_ranks(Communicator& group) {
  const auto own = torch::full({1000}, process_context().rank(), torch::kLong);
  group.all_reduce(own, ReduceOp::kSum, "ranks").wait();
  return own[999].item<int64_t>();
}

TEST(StoreCommunicator, ConnectsTheRanksThatMeetInAStore) {
  const auto group = group_of("all", all_ranks());
  const auto communicator = make_communicator(group, at::kCPU);
  EXPECT_EQ(communicator->name(), "all");
  EXPECT_EQ(communicator->ranks(), group.ranks);
  EXPECT_EQ(communicator->rank(), process_context().rank());
  EXPECT_EQ(sum_of_ranks(*communicator), std::accumulate(group.ranks.begin(), group.ranks.end(), int64_t{0}));
}

TEST(StoreCommunicator, IsMadeAgainInTheSameStore) {
  for (int time = 0; time < 3; ++time) {
    const auto group = group_of("again", all_ranks());
    EXPECT_EQ(sum_of_ranks(*make_communicator(group, at::kCPU)),
              std::accumulate(group.ranks.begin(), group.ranks.end(), int64_t{0}));
  }
}

TEST(StoreCommunicator, ConnectsSomeOfTheRanks) {
  const int rank = process_context().rank(), size = process_context().world_size();
  std::vector<int64_t> half;
  for (int other = size - 1 - (size - 1 - rank) % 2; other >= 0; other -= 2) half.push_back(other); // not in ascending order
  const auto communicator = make_communicator(group_of(c10::str("half", rank % 2), half), at::kCPU);
  EXPECT_EQ(sum_of_ranks(*communicator), std::accumulate(half.begin(), half.end(), int64_t{0}));
}

TEST(StoreCommunicator, ReadsInTheMemoryOfTheOthers) {
  const auto communicator = make_communicator(group_of("memory", all_ranks()), at::kCPU);
  const int64_t numel = 100'000, size = communicator->size(); // too long for a slot
  const auto bytes = static_cast<size_t>(numel * size) * sizeof(int64_t);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, communicator->allocate(static_cast<int64_t>(bytes)));
  const auto output = torch::empty({0}, torch::kLong).set_(storage, 0, {size, numel});
  const auto own = output[process_context().rank()].fill_(process_context().rank());
  communicator->all_gather_into(output, own, "memory").wait();
  EXPECT_TRUE(output.equal(torch::arange(size).unsqueeze(1).expand({size, numel})));
}

TEST(StoreCommunicator, NamesTheRanksThatDoNotCome) {
  if (process_context().world_size() < 2) return;
  if (process_context().rank() == 0) {
    auto group = group_of("alone", all_ranks());
    group.options.timeout = std::chrono::milliseconds(300);
    auto others = group.ranks;
    others.erase(others.begin());
    EXPECT_THROWS_WITH(make_communicator(group, at::kCPU),
                       c10::str("group alone on rank 0: timed out after 300 ms; of ", group.ranks.size(),
                                " ranks these did not come: ", c10::Join(", ", others)));
  }
  sum_of_ranks(*make_communicator(group_of("after", all_ranks()), at::kCPU));
}

TEST(StoreCommunicator, RefusesWhatIsNoGroup) {
  auto group = group_of("bad", all_ranks());
  group.rank = process_context().world_size();
  EXPECT_THROWS_WITH(make_communicator(group, at::kCPU),
                     c10::str("group bad: rank ", group.rank, " is not in [0, ", group.rank, ")"));
  group.rank = 0;
  group.ranks = {-1};
  EXPECT_THROWS_WITH(make_communicator(group, at::kCPU), "group bad: the rank -1 is negative");
}

} // namespace
} // namespace tessera::internal::store_communicator_test
