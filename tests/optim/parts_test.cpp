// What the steps of sharded parameters exchange.
#include <gmock/gmock.h>
#include <tessera/optim/parts/on_whole.h>
#include <tessera/optim/parts/shared_sums.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/optim/layouts.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::parts_test {
namespace {

at::Tensor example(int64_t number) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(number));
  return torch::randn({5, 3, 2}, generator, torch::kDouble).to(init_device_mesh(mesh_device_type, {world_size()}).device());
}

/// Tensors in all layouts, each whole and as a DTensor.
std::vector<std::pair<at::Tensor, at::Tensor>> examples() {
  std::vector<std::pair<at::Tensor, at::Tensor>> all;
  for (const auto& layout : layouts(5, 3)) {
    const auto whole = example(static_cast<int64_t>(all.size()));
    all.emplace_back(whole, distribute_tensor(whole, layout.mesh, layout.placements));
  }
  all.emplace_back(example(100), example(100));
  return all;
}

TEST(OnWhole, GivesEachRankItsPartOfTheWholesResult) {
  const torch::NoGradGuard no_grad;
  const auto compute = [](const at::Tensor& whole) { return whole.cumsum(0).flip(1) * whole.sum(); };
  std::vector<at::Tensor> tensors;
  for (const auto& [whole, distributed] : examples()) tensors.push_back(distributed);
  const auto results = internal::on_whole(tensors, compute, "a test");
  ASSERT_EQ(results.size(), tensors.size());
  for (size_t i = 0; i < results.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_TENSORS_EQUAL(full(results[i]), compute(examples()[i].first).cpu());
  }
}

TEST(OnWhole, SendsPartsTwiceWhateverTheNumberOfTensors) {
  const torch::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(mesh_device_type, {world_size()});
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < 7; ++i) tensors.push_back(distribute_tensor(example(i), mesh, {Shard{0}}));
  auto& counters = mesh.communicator()->counters();
  counters.reset();
  internal::on_whole(
      tensors, [](const at::Tensor& whole) { return whole.clone(); }, "a test");
  EXPECT_EQ(counters.get(CollectiveKind::kAllToAll).calls, world_size() > 1 ? 2 : 0);
  EXPECT_EQ(counters.get(CollectiveKind::kAllGather).calls, 0);
  EXPECT_EQ(counters.get(CollectiveKind::kAllReduce).calls, 0);
}

TEST(SharedSums, AddUpWhatTheRanksHold) {
  const torch::NoGradGuard no_grad;
  std::vector<internal::ShareOfSums> shares;
  std::vector<at::Tensor> expected;
  for (const auto& [whole, distributed] : examples()) {
    const auto part = internal::part_of(distributed);
    shares.push_back({distributed, torch::stack({part.sum(), part.square().sum()})});
    expected.push_back(torch::stack({whole.sum(), whole.square().sum()}));
  }
  const auto sums = internal::shared_sums(shares, "a test");
  for (size_t i = 0; i < sums.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_TRUE(torch::allclose(sums[i], expected[i]));
  }
}

} // namespace
} // namespace tessera::testing::parts_test
