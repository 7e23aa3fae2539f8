#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::optimizer_test {
namespace {

const std::vector<std::vector<int64_t>> kShapes{{5, 3}, {7}, {2, 3, 2}, {1}};

std::vector<at::Tensor> weights(uint64_t seed) {
  torch::manual_seed(seed);
  std::vector<at::Tensor> result;
  for (const auto& shape : kShapes) result.push_back(torch::randn(shape));
  return result;
}

/// Five steps with given gradients, plain and as DTensors laid out by `place`.
template <typename MakeOptimizer, typename Place>
void compare(const MakeOptimizer& make_optimizer, const Place& place, double clip) {
  const auto mesh = line_mesh();
  auto plain = weights(1);
  std::vector<at::Tensor> sharded;
  for (const auto& weight : plain) sharded.push_back(distribute_tensor(weight, mesh, {place(weight)}));
  for (auto& weight : plain) weight.requires_grad_();
  for (auto& weight : sharded) weight.requires_grad_();
  auto reference = make_optimizer(plain);
  auto optimizer = make_optimizer(sharded);
  for (uint64_t step = 0; step < 5; ++step) {
    reference->zero_grad(step != 2);
    optimizer->zero_grad(step != 2);
    const auto gradients = weights(100 + step);
    for (size_t i = 0; i < plain.size(); ++i) {
      plain[i].mutable_grad() = gradients[i].clone();
      sharded[i].mutable_grad() = make(gradients[i], mesh, {place(plain[i])});
    }
    const double expected = torch::nn::utils::clip_grad_norm_(plain, clip);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(sharded, clip), expected, 1e-5 * expected);
    reference->step();
    optimizer->step();
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TENSORS_CLOSE(DTensor(sharded[i]).full_tensor().detach(), plain[i].detach())
          << "step " << step << ", parameter " << i;
      EXPECT_EQ(DTensor(sharded[i]).placements(), Placements{place(plain[i])});
    }
  }
}

std::vector<std::function<Placement(const at::Tensor&)>> layouts() {
  return {[](const at::Tensor&) -> Placement { return Replicate{}; }, [](const at::Tensor&) -> Placement { return Shard{0}; },
          [](const at::Tensor& t) -> Placement { return Shard{t.dim() - 1}; },
          [](const at::Tensor& t) { return ragged_shards(t.sizes().vec(), world_size()).back(); },
          [](const at::Tensor& t) { return ragged_shards(t.sizes().vec(), world_size()).front(); }};
}

template <typename Optimizer, typename Options>
void compare_all(const Options& options) {
  const auto build = [&](const std::vector<at::Tensor>& parameters) { return std::make_unique<Optimizer>(parameters, options); };
  for (const auto& place : layouts()) {
    compare(build, place, 0.5);
    compare(build, place, 1e6);
  }
}

TEST(Optimizer, Adamw) { compare_all<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1)); }
TEST(Optimizer, AdamwAmsgrad) { compare_all<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true)); }
TEST(Optimizer, Adam) { compare_all<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).weight_decay(0.1)); }
TEST(Optimizer, Sgd) { compare_all<torch::optim::SGD>(torch::optim::SGDOptions(1e-2)); }
TEST(Optimizer, SgdMomentum) {
  compare_all<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9).weight_decay(0.1).nesterov(true));
}
TEST(Optimizer, Rmsprop) { compare_all<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).momentum(0.9).centered(true)); }
TEST(Optimizer, Adagrad) {
  compare_all<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.1));
}

TEST(ClipGradNorm, OneAllReduceForAnyNumberOfParameters) {
  const auto mesh = line_mesh();
  for (const double p : {2.0, 1.0, 3.0, static_cast<double>(INFINITY)}) {
    std::vector<at::Tensor> plain, sharded;
    for (int i = 0; i < 40; ++i) {
      torch::manual_seed(i);
      plain.push_back(torch::zeros({3, i % 5 + 1}).requires_grad_());
      plain.back().mutable_grad() = torch::randn_like(plain.back());
      const auto sizes = plain.back().sizes().vec();
      const Placement place = i % 2 ? Placement(Shard{i % 4 / 2})
                                    : ragged_shards(sizes, mesh.size())[i % 3 % ragged_shards(sizes, mesh.size()).size()];
      sharded.push_back(distribute_tensor(plain.back(), mesh, {place}));
      sharded.back().mutable_grad() = make(plain.back().grad(), mesh, {place});
    }
    const auto expected = torch::nn::utils::clip_grad_norm_(plain, 0.7, p);
    process_context().reset_counters();
    const auto total = torch::nn::utils::clip_grad_norm_(sharded, 0.7, p, true);
    EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, world_size() > 1 ? 1 : 0) << "p = " << p;
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 0);
    EXPECT_NEAR(total, expected, 1e-5 * expected);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(DTensor(sharded[i].grad()).full_tensor(), plain[i].grad());
    torch::nn::utils::clip_grad_value_(plain, 0.01);
    torch::nn::utils::clip_grad_value_(sharded, 0.01);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(DTensor(sharded[i].grad()).full_tensor(), plain[i].grad());
  }
}

TEST(ClipGradNorm, ReplicatedAndSplitGradientsTogether) {
  const auto mesh = line_mesh();
  auto plain = weights(3);
  std::vector<at::Tensor> sharded;
  for (size_t i = 0; i < plain.size(); ++i) {
    Placement place = Shard{0};
    if (i % 2) place = Replicate{};
    sharded.push_back(distribute_tensor(plain[i], mesh, {place}));
    sharded[i].mutable_grad() = make(plain[i], mesh, {place});
    plain[i].mutable_grad() = plain[i].clone();
  }
  const auto expected = torch::nn::utils::clip_grad_norm_(plain, 0.1);
  process_context().reset_counters();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(sharded, 0.1), expected, 1e-5 * expected);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, world_size() > 1 ? 1 : 0);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TENSORS_CLOSE(DTensor(sharded[i].grad()).full_tensor(), plain[i].grad());
}

TEST(ClipGradNorm, OnTwoDimsOnlyTheShardDimCommunicates) {
  if (world_size() != 4) GTEST_SKIP() << "needs 4 ranks";
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"replicate", "shard"});
  auto plain = weights(3);
  std::vector<at::Tensor> sharded;
  for (auto& weight : plain) {
    const auto place = ragged_shards(weight.sizes().vec(), 2).back();
    sharded.push_back(distribute_tensor(weight, mesh, {Replicate{}, place}));
    sharded.back().mutable_grad() = make(weight, mesh, {Replicate{}, place});
    weight.mutable_grad() = weight.clone();
  }
  const auto expected = torch::nn::utils::clip_grad_norm_(plain, 0.1);
  const auto before = mesh.communicator(0)->counters().get(CollectiveKind::kAllReduce).calls;
  process_context().reset_counters();
  EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(sharded, 0.1), expected, 1e-5 * expected);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, 1);
  EXPECT_LE(mesh.communicator(0)->counters().get(CollectiveKind::kAllReduce).calls, before);
}

} // namespace
} // namespace tessera::testing::optimizer_test
