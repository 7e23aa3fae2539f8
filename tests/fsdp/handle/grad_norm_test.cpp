#include <tessera/optim/grad_norm.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/no_sync.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::grad_norm_test {
namespace {

using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Net with_gradients(const Strategy* strategy, bool freezes = false) {
  Net net = make_net();
  if (freezes) net->blocks[0]->as<Block>()->norm->weight.requires_grad_(false); // no gradient
  if (strategy) shard_model(net, *strategy);
  const auto tokens = global_batch(0);
  loss_of(net, strategy ? part_of(tokens, world_rank(), world_size()).to(test_device()) : tokens).backward();
  return net;
}

TEST(GradNorm, ClipsAsLibTorchDoesOnTheUnshardedTwin) {
  for (const auto& strategy : strategies()) {
    for (const double type : {2.0, 1.0, 3.0, 0.5, 0.0, kInfinity}) {
      SCOPED_TRACE(strategy.name + ", norm " + std::to_string(type));
      Net plain = with_gradients(nullptr, true), net = with_gradients(&strategy, true);
      const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01, type);
      const auto norm = clip_grad_norm_(*net, 0.01, type);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * std::max(1.0, expected));
      for (const auto& item : net->named_parameters()) {
        const Tensor twin = plain->named_parameters()[item.key()];
        ASSERT_EQ(item.value().grad().defined(), twin.grad().defined());
        if (twin.grad().defined()) EXPECT_TENSORS_CLOSE(full(item.value().grad()), twin.grad(), 1e-4, 1e-7);
      }
    }
  }
}

TEST(GradNorm, CostsOneAllReduceAMesh) {
  const auto row = init_device_mesh(test_device_type(), {world_size()});
  const auto grid = init_device_mesh(test_device_type(), {1, world_size()}, {"replicate", "shard"});
  torch::nn::Linear first(4, 5), second(5, 3), twin_first(4, 5), twin_second(5, 3);
  for (const auto& [from, to] : {std::pair{first, twin_first}, std::pair{second, twin_second}}) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : from->parameters()) parameter.copy_(torch::linspace(-1, 1, parameter.numel()).view_as(parameter));
    for (auto& parameter : to->parameters()) parameter.copy_(torch::linspace(-1, 1, parameter.numel()).view_as(parameter));
  }
  fully_shard(first, row);
  fully_shard(second, grid);
  const auto x = torch::arange(8.0).view({2, 4});
  second(first(x.to(test_device()))).square().sum().backward();
  twin_second(twin_first(x)).square().sum().backward();
  const auto all = [](torch::nn::Linear& a, torch::nn::Linear& b) {
    auto parameters = a->parameters();
    for (const auto& each : b->parameters()) parameters.push_back(each);
    return parameters;
  };
  const auto expected = torch::nn::utils::clip_grad_norm_(all(twin_first, twin_second), 0.5);
  process_context().reset_counters();
  const auto norm = clip_grad_norm_(all(first, second), 0.5);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, world_size() > 1 ? 2 : 0);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 0);
  EXPECT_NEAR(norm.item<double>(), expected, 1e-4 * expected);
  EXPECT_TENSORS_CLOSE(full(second->weight.grad()), twin_second->weight.grad());
  EXPECT_TENSORS_CLOSE(full(first->bias.grad()), twin_first->bias.grad());
}

TEST(GradNorm, CountsEachPlacementOnce) {
  const auto mesh = init_device_mesh(test_device_type(),
                                     {world_size() % 2 == 0 ? 2 : 1, world_size() % 2 == 0 ? world_size() / 2 : world_size()});
  const auto whole = torch::arange(1.0, 36.0).view({7, 5});
  for (const auto& placements : {Placements{Replicate{}, Replicate{}}, Placements{Shard{0}, Replicate{}},
                                 Placements{Replicate{}, Shard{1}}, Placements{Shard{0}, Shard{1}}}) {
    for (const double type : {2.0, 1.0, kInfinity, -kInfinity}) {
      const std::vector<Tensor> tensors{distribute_tensor(whole, mesh, placements),
                                        distribute_tensor(whole * 0.5, mesh, {Shard{0}, Shard{0}}), Tensor(),
                                        (whole * 0.25).to(test_device())};
      const auto expected = torch::cat({whole, whole * 0.5, whole * 0.25}).flatten();
      EXPECT_NEAR(get_total_norm(tensors, type).item<double>(), torch::linalg_vector_norm(expected, type).item<double>(), 1e-3);
    }
  }
}

/// Half of the ranks, or all where their number is odd: those that have the same expert.
DeviceMesh experts_mesh() {
  const int64_t experts = world_size() % 2 == 0 ? 2 : 1;
  return init_device_mesh(test_device_type(), {world_size() / experts, experts}, {"same", "expert"});
}

TEST(GradNorm, CountsTheExpertsOfOtherRanks) {
  const auto mesh = experts_mesh();
  const auto expert = static_cast<double>(world_rank() % mesh.size(1)) + 2;
  std::vector<Tensor> everywhere{torch::ones({7, 3})};
  for (int64_t i = 0; i < mesh.size(1); ++i) everywhere.push_back(torch::full({5}, static_cast<double>(i) + 2));
  for (const double type : {2.0, 1.0, kInfinity, -kInfinity}) {
    const std::vector<Tensor> tensors{distribute_tensor(torch::full({5}, expert), mesh["same"], {Shard{0}}),
                                      distribute_tensor(torch::ones({7, 3}), world_mesh(), {Shard{0}})};
    std::vector<Tensor> flat;
    for (const auto& each : everywhere) flat.push_back(each.flatten());
    EXPECT_NEAR(get_total_norm(tensors, type).item<double>(), torch::linalg_vector_norm(torch::cat(flat), type).item<double>(),
                1e-4);
  }
}

TEST(GradNorm, IsOneForAModelWithExperts) {
  const auto mesh = experts_mesh();
  torch::manual_seed(0);
  torch::nn::Linear dense(6, 6);
  torch::manual_seed(1 + world_rank() % mesh.size(1)); // each expert has weights of its own
  torch::nn::Linear expert(6, 4);
  torch::nn::Sequential net(dense, expert);
  fully_shard(*(*net)[1], mesh["same"]);
  fully_shard(net, world_mesh());
  net->forward(torch::ones({2, 6}, test_device())).square().sum().backward();
  const auto norms = torch::stack({full(dense->weight.grad()).norm(), full(dense->bias.grad()).norm()}).square().sum();
  auto mine = torch::stack({full(expert->weight.grad()).norm(), full(expert->bias.grad()).norm()}).square().sum();
  const auto sum =
      from_local(mine.to(test_device()) / static_cast<double>(mesh.size(0)), world_mesh(), {Partial{}}).full_tensor();
  EXPECT_NEAR(clip_grad_norm_(*net, 0.1).item<double>(), (norms + sum).sqrt().item<double>(), 1e-4);
  EXPECT_NEAR(
      get_total_norm({dense->weight.grad(), dense->bias.grad(), expert->weight.grad(), expert->bias.grad()}).item<double>(), 0.1,
      1e-5);
}

/// An expert that got no row in this step, under roots of which some or all dims are copies.
TEST(GradNorm, ARankWithoutAGradientOfItsExpertTakesPart) {
  const auto ranks = world_size();
  const auto grid = ranks % 2 == 0 ? init_device_mesh(mesh_device_type, {2, ranks / 2}, {"replicate", "shard"})
                                   : init_device_mesh(mesh_device_type, {ranks, 1}, {"replicate", "shard"});
  const auto own = make_device_mesh(mesh_device_type, {1}, {world_rank()});
  for (const bool replicates : {false, true}) {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(6, 6), torch::nn::Linear(6, 4));
    fully_shard(*(*net)[1], own, {.initial_weights = InitialWeights::kUnchecked});
    replicates ? replicate(*net, world_mesh()) : fully_shard(*net, grid);
    const bool is_used = world_rank() + 1 < ranks;
    auto y = (*net)[0]->as<torch::nn::Linear>()->forward(torch::ones({2, 6}, test_device()));
    if (is_used) y = (*net)[1]->as<torch::nn::Linear>()->forward(y);
    y.sum().backward();
    const auto norm = clip_grad_norm_(*net, 0.1).to(test_device());
    EXPECT_GT(norm.item<double>(), 0);
    EXPECT_TENSORS_EQUAL(from_local(norm, world_mesh(), {Partial{Partial::Op::kMax}}).full_tensor().cpu(), norm.cpu());
  }
}

TEST(GradNorm, OfTypeZeroCountsTheTensorsThatAreNotZeroEverywhere) {
  auto last_row = torch::zeros({7, 3});
  last_row[6][2] = 1; // on one rank
  const auto mesh = experts_mesh();
  const bool has_last_expert = world_rank() % mesh.size(1) == mesh.size(1) - 1;
  const Tensor sharded = distribute_tensor(last_row, world_mesh(), {Shard{0}}),
               zeros = distribute_tensor(torch::zeros({5}), world_mesh(), {Shard{0}}),
               whole = distribute_tensor(torch::ones({2}), world_mesh(), {Replicate{}}),
               expert = distribute_tensor(torch::full({5}, has_last_expert ? 1.0 : 0.0), mesh["same"], {Shard{0}}),
               plain = torch::ones({2}, torch::TensorOptions(test_device()).dtype(torch::kFloat));
  EXPECT_NEAR(get_total_norm({plain, plain * 0}, 0).item<double>(), 1, 1e-6);
  EXPECT_NEAR(get_total_norm({sharded, zeros, whole, plain, plain * 0}, 0).item<double>(), 3, 1e-6);
  EXPECT_NEAR(get_total_norm({sharded, zeros, expert}, 0).item<double>(), 2, 1e-6);
  const Tensor parameter = distribute_tensor(torch::zeros({5}), world_mesh(), {Shard{0}}).requires_grad_(),
               gradient = distribute_tensor(torch::ones({5}), world_mesh(), {Shard{0}});
  if (world_rank() == 0) parameter.mutable_grad() = gradient; // the others reduce as many flags
  EXPECT_NEAR(clip_grad_norm_({parameter, sharded}, 1, 0).item<double>(), 1, 1e-6);
}

TEST(GradNorm, ClipsGradientsThatArePartialSums) {
  auto parameter = distribute_tensor(torch::zeros({5}), world_mesh(), {Replicate{}});
  parameter.mutable_grad() = from_local(torch::full({5}, world_rank() + 1.0F, test_device()), world_mesh(), {Partial{}});
  const auto before = full(parameter.grad());
  EXPECT_NEAR(clip_grad_norm_({parameter}, 0.5).item<double>(), before.norm().item<double>(), 1e-5);
  EXPECT_TENSORS_CLOSE(full(parameter.grad()), before * (0.5 / before.norm()), 1e-5, 1e-6);
}

TEST(GradNorm, CountsATiedParameterOnce) {
  const auto options = torch::nn::LinearOptions(3, 3).bias(false);
  torch::nn::Linear first(options), second(options);
  second->register_parameter("tied", first->weight);
  torch::nn::Sequential net(first, second);
  fully_shard(net, world_mesh(), {.initial_weights = InitialWeights::kBroadcast});
  net->forward(torch::ones({1, 3}, test_device())).square().sum().backward();
  const auto before = full(first->weight.grad());
  const auto expected = torch::stack({before.norm(), full(second->weight.grad()).norm()}).norm().item<double>();
  EXPECT_NEAR(clip_grad_norm_(*net, 0.5 * expected).item<double>(), expected, 1e-5);
  EXPECT_TENSORS_CLOSE(full(first->weight.grad()), before * 0.5, 1e-4, 1e-6);
  ASSERT_EQ(net->parameters().size(), 3U) << "one of them twice";
  EXPECT_NEAR(clip_grad_norm_(net->parameters(), 0.25 * expected).item<double>(), 0.5 * expected, 1e-5);
  EXPECT_TENSORS_CLOSE(full(first->weight.grad()), before * 0.25, 1e-4, 1e-6);
}

TEST(GradNorm, IsTheSameOnAllRanksBesidePlainTensorsThatDiffer) {
  const auto sharded = distribute_tensor(torch::ones({8}), world_mesh(), {Shard{0}});
  const auto plain =
      torch::full({1}, static_cast<double>(world_rank()), torch::TensorOptions(test_device()).dtype(torch::kFloat));
  double mean_square = 0;
  for (int64_t rank = 0; rank < world_size(); ++rank)
    mean_square += static_cast<double>(rank * rank) / static_cast<double>(world_size());
  EXPECT_NEAR(get_total_norm({plain, sharded}).item<double>(), std::sqrt(8 + mean_square), 1e-5);
}

TEST(GradNorm, DoesNotOverflowAndReportsWhatIsNotFinite) {
  const auto large = distribute_tensor(torch::full({4}, 0.75e19), world_mesh(), {Shard{0}});
  EXPECT_NEAR(get_total_norm({large, large}).item<double>() / (1.5e19 * std::sqrt(2.0)), 1, 1e-5);
  const auto half = distribute_tensor(torch::full({4}, 60000.0, torch::kHalf), world_mesh(), {Shard{0}});
  EXPECT_NEAR(get_total_norm({half}).item<double>(), 120000, 200);
  EXPECT_EQ(get_total_norm({}).item<double>(), 0);
  auto parameter = distribute_tensor(torch::ones({4}), world_mesh(), {Shard{0}}).requires_grad_();
  parameter.mutable_grad() =
      distribute_tensor(torch::tensor({1.0F, 2.0F, 3.0F, static_cast<float>(kInfinity)}), world_mesh(), {Shard{0}});
  EXPECT_THROWS_WITH(clip_grad_norm_({parameter}, 1.0, 2.0, true),
                     "The total norm of order 2 for gradients from `parameters` is non-finite");
  EXPECT_EQ(full(parameter.grad())[0].item<double>(), 1); // nothing was scaled
  EXPECT_EQ(clip_grad_norm_({parameter}, 1.0).item<double>(), kInfinity);
  EXPECT_THROWS_WITH(get_total_norm({parameter}, std::nan("")), "the type of the norm is NaN");
}

TEST(GradNorm, ClipsNarrowTypesByAFactorInFloat) {
  for (const auto& [dtype, value, most] :
       {std::tuple(torch::kHalf, 60000.0, 1e-3), {torch::kHalf, 60000.0, 1.0}, {torch::kBFloat16, 3.0, 1.0}}) {
    auto weight = torch::zeros({5000}, dtype).requires_grad_();
    weight.mutable_grad() = torch::full({5000}, value, dtype);
    clip_grad_norm_({weight}, most);
    const auto expected = torch::full({5000}, most / std::sqrt(5000.0)).to(dtype);
    EXPECT_TENSORS_CLOSE(weight.grad().to(torch::kFloat), expected.to(torch::kFloat), dtype == torch::kHalf ? 2e-3 : 8e-3, 1e-7);
  }
}

TEST(GradNorm, AddsUpWhatASparseGradientHasTwice) {
  for (const double type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(6, 3).sparse(true)), dense(6, 3);
    const torch::NoGradGuard no_grad;
    dense->weight.copy_(sparse->weight);
    for (auto each : {sparse, dense}) {
      const torch::AutoGradMode grad_mode(true);
      each->forward(torch::tensor({1, 1, 1, 2})).square().sum().backward();
    }
    const auto norm = clip_grad_norm_({sparse->weight}, 1.0, type), expected = clip_grad_norm_({dense->weight}, 1.0, type);
    EXPECT_NEAR(norm.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    EXPECT_TENSORS_CLOSE(sparse->weight.grad().to_dense(), dense->weight.grad(), 1e-5, 1e-7);
  }
}

TEST(GradNorm, ClipsNothingWhereOneGradientCannotBeWritten) {
  auto first = torch::zeros({4}).requires_grad_(), second = torch::zeros({4}).requires_grad_();
  first.mutable_grad() = torch::ones({4});
  second.mutable_grad() = torch::ones({1}).expand({4});
  EXPECT_THROWS_WITH(clip_grad_norm_({first, second}, 0.1), "single memory location");
  EXPECT_TENSORS_EQUAL(first.grad(), torch::ones({4}));
}

TEST(GradNorm, RefusesGradientsThatWaitForTheirReduction) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  {
    const auto scope = no_sync(*net);
    loss_of(net, own_batch(0).to(test_device())).backward();
  }
  EXPECT_THROWS_WITH(clip_grad_norm_(net->parameters(), 1.0), "never reduced");
}

} // namespace
} // namespace tessera::testing::grad_norm_test
