// A layer of experts on one rank and on many, beside one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/fsdp/fully_shard.h>
#include <tessera/training/averaged_model.h>

#include <tessera/tests/parallel/experts/mixture_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <cmath>

namespace tessera::testing::moe_test {
namespace {

using torch::Tensor;

/// Each token by itself.
Tensor plainly(MoE& moe, const Tensor& x) {
  const auto routing = route(moe->router().forward(x), moe->options().route, moe->router().bias);
  auto* stacked = moe->experts()->as<StackedExperts>();
  auto* list = moe->experts()->as<torch::nn::ModuleList>();
  std::vector<Tensor> rows;
  for (int64_t token = 0; token < x.size(0); ++token) {
    auto sum = torch::zeros_like(x[token]);
    for (int64_t choice = 0; choice < routing.experts.size(1); ++choice) {
      const auto expert = routing.experts[token][choice].item<int64_t>();
      Tensor y;
      if (list) {
        y = list->ptr<FeedForwardImpl>(static_cast<size_t>(expert))->forward(x[token]);
      } else {
        const auto up = torch::linear(x[token], stacked->up[expert]);
        const auto hidden =
            stacked->gate.defined() ? torch::silu(torch::linear(x[token], stacked->gate[expert])) * up : torch::gelu(up);
        y = torch::linear(hidden, stacked->down[expert]);
      }
      sum = sum + y * routing.weights[token][choice];
    }
    rows.push_back(moe->shared() ? sum + FeedForward(moe->shared())->forward(x[token]) : sum);
  }
  return torch::stack(rows);
}

TEST(MoE, ComputesEachTokensExperts) {
  for (const auto kind : {ExpertKind::kSwiGLU, ExpertKind::kGelu}) {
    for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
      for (const int64_t shared : {0, 12}) {
        SCOPED_TRACE(c10::str(static_cast<int>(kind), static_cast<int>(storage), shared));
        torch::manual_seed(4);
        MoE moe(MoEOptions{.width = 8, .hidden = 12, .experts = 6, .shared_hidden = shared, .kind = kind, .storage = storage});
        const auto x = torch::randn({10, 8}).requires_grad_();
        const auto y = moe(x.view({5, 2, 8})).view({10, 8}), expected = plainly(moe, x);
        EXPECT_TENSORS_CLOSE(y, expected, 1e-5, 1e-6);
        std::vector<Tensor> inputs = moe->parameters();
        inputs.push_back(x);
        const auto got = torch::autograd::grad({y.sin().sum()}, inputs),
                   wanted = torch::autograd::grad({expected.sin().sum()}, inputs, {}, std::nullopt, false, /*allow_unused=*/true);
        for (size_t i = 0; i < inputs.size(); ++i)
          EXPECT_TENSORS_CLOSE(got[i], wanted[i].defined() ? wanted[i] : torch::zeros_like(got[i]), 1e-5, 1e-6) << i;
        EXPECT_EQ(moe->statistics().counts.sum().item<int64_t>(), 20);
      }
    }
  }
}

TEST(MoE, DrawsTheSameExpertsStackedAndByThemselves) {
  torch::manual_seed(4);
  MoE stacked(MoEOptions{.width = 8, .hidden = 12, .experts = 6});
  torch::manual_seed(4);
  MoE list(MoEOptions{.width = 8, .hidden = 12, .experts = 6, .storage = ExpertStorage::kModules});
  const auto whole = stacked->named_parameters(), parts = list->named_parameters();
  EXPECT_TRUE(torch::equal(whole["router.weight"], parts["router.weight"]));
  for (const auto* name : {"gate", "up", "down"}) {
    for (int64_t i = 0; i < 6; ++i)
      EXPECT_TRUE(torch::equal(whole[c10::str("experts.", name)][i], parts[c10::str("experts.", i, ".", name, ".weight")]));
  }
  EXPECT_FALSE(torch::equal(whole["experts.up"][0], whole["experts.up"][1]));
  EXPECT_NEAR(whole["experts.down"].abs().max().item<double>(), 1 / std::sqrt(12.0), 0.03);
}

TEST(MoE, RefusesWhatDoesNotFit) {
  const auto with = [](const std::function<void(MoEOptions&)>& change) {
    MoEOptions options{.width = 8, .hidden = 4, .experts = 4};
    change(options);
    return [options] { MoE moe(options); };
  };
  EXPECT_THROWS_WITH(with([](auto& options) { options.width = 0; })(), "MoE: width is 0, but must be positive");
  EXPECT_THROWS_WITH(with([](auto& options) { options.hidden = -1; })(), "MoE: hidden is -1");
  EXPECT_THROWS_WITH(with([](auto& options) { options.experts = 0; })(), "MoE: experts is 0");
  EXPECT_THROWS_WITH(with([](auto& options) { options.route.top_k = 5; })(), "route: top_k is 5, of 4 experts");
  EXPECT_THROWS_WITH(with([](auto& options) { options.bias_rate = -1; })(), "MoE: bias_rate is -1");
  EXPECT_THROWS_WITH(with([](auto& options) { options.losses.z = -1; })(), "must not be negative");
  MoE moe(MoEOptions{.width = 8, .hidden = 4, .experts = 4});
  EXPECT_THROWS_WITH(moe(torch::randn({3, 7})), "x has the shape [3, 7], but a width of 8 is expected");
  moe->router().weight.detach().fill_(NAN);
  EXPECT_THROWS_WITH(moe(torch::randn({3, 8})), "the router returned NaN for 3 of 3 tokens");
}

TEST(MoE, BalancesByItsBias) {
  torch::manual_seed(5);
  MoE moe(MoEOptions{
      .width = 8, .hidden = 4, .experts = 4, .route = {.top_k = 1, .score = RouterScore::kSigmoid}, .bias_rate = 0.005});
  const auto x = torch::randn({400, 8}) + torch::randn({8});
  const auto imbalance = [&] {
    moe(x);
    return moe->statistics().counts.max().item<double>() / 100;
  };
  const auto before = imbalance();
  for (int step = 0; step < 150; ++step) {
    moe(x);
    update_expert_bias(*moe);
  }
  EXPECT_GT(before, 1.3);
  EXPECT_LT(imbalance(), 1.15);
  EXPECT_NEAR(moe->router().bias.sum().item<double>(), 0, 1e-5);
  const auto bias = moe->router().bias.clone();
  moe->eval();
  moe(x);
  moe->train();
  update_expert_bias(*moe); // of the forward before, whose counts are balanced, and none of an evaluation
  EXPECT_LE((moe->router().bias - bias).abs().max().item<double>(), 0.01 + 1e-6);
}

void compare(const MixtureCase& plan, MoEOptions options, const FullyShardOptions& sharding = {}) {
  if (!plan.divides_batch()) return;
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    options.storage = storage;
    SCOPED_TRACE(c10::str(plan.text(), storage == ExpertStorage::kStacked ? ", stacked" : ", modules"));
    expect_same_mixture(train_mixture_on_ranks(seeded_mixture(options), plan, sharding), train_mixture_alone(options, plan));
  }
}

TEST(MoE, MustKnowTheRanksWhoseTokensCountTogether) {
  if (world_size() == 1) GTEST_SKIP() << "a rank alone";
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  const MoEOptions sizes{.width = 8, .hidden = 12, .experts = 4};
  auto balanced = sizes, limited = sizes, biased = sizes;
  balanced.losses.balance = 0.1;
  limited.capacity = Capacity{};
  biased.bias_rate = 0.1;
  const auto x = torch::randn({6, 8});
  const auto make = [&](const MoEOptions& options, bool is_told) {
    torch::manual_seed(3);
    MoE moe(options);
    if (is_told) {
      expert_parallel(*moe, expert_mesh(mesh, 1)["ep"], {.tokens = mesh});
      fully_shard(*moe->experts(), mesh);
    }
    fully_shard(moe, mesh);
    return moe;
  };
  EXPECT_NO_THROW(make(sizes, false)->forward(x));
  EXPECT_THROWS_WITH(make(balanced, false)->forward(x), "a balancing loss is of the tokens of all ranks");
  EXPECT_THROWS_WITH(make(limited, false)->forward(x), "a capacity is of the tokens of all ranks");
  EXPECT_THROWS_WITH(update_expert_bias(*make(biased, false)), "a balancing bias is of the tokens of all ranks");
  for (const auto& options : {balanced, limited, biased}) {
    auto moe = make(options, true);
    moe->forward(x).sum().backward();
    EXPECT_NO_THROW(update_expert_bias(*moe));
  }
}

TEST(MixtureTraining, IsThatOfOneProcess) {
  for (const auto& plan : sweep(mixture_cases(world_size()), 3)) compare(plan, mixture_options());
}

TEST(MixtureTraining, RecomputesAndAccumulates) {
  for (auto plan : sweep(mixture_cases(world_size()), 1)) {
    plan.steps = 8;
    plan.recomputes = true;
    compare(plan, mixture_options());
    plan.micro_batches = 2;
    compare(plan, mixture_options());
    plan.splits_sequences = plan.tensor > 1;
    compare(plan, mixture_options());
  }
}

TEST(MixtureTraining, TakesSharedExpertsGroupsAndCapacity) {
  auto options = mixture_options();
  options.kind = ExpertKind::kGelu;
  options.shared_hidden = 8;
  options.route = {.top_k = 3, .groups = 4, .top_groups = 2, .scale = 1.5};
  options.capacity = {.factor = 0.9};
  for (auto plan : sweep(mixture_cases(world_size()), 2)) {
    plan.steps = 6;
    compare(plan, options);
    plan.splits_sequences = plan.tensor > 1;
    compare(plan, options);
  }
}

TEST(MixtureTraining, BalancesSequencesAlikeOnAllRanks) {
  auto options = mixture_options();
  options.losses.scope = BalanceScope::kSequence;
  for (auto plan : sweep(mixture_cases(world_size()), 2)) {
    if (plan.tensor > 1) continue;
    plan.steps = 6;
    plan.micro_batches = 2;
    compare(plan, options);
  }
}

TEST(MixtureTraining, KeepsAveragesOfWeights) {
  for (auto plan : sweep(mixture_cases(world_size()), 2)) {
    if (!plan.divides_batch()) continue;
    SCOPED_TRACE(plan.text());
    const auto averages_of = [&](Mixture& model, int64_t rank, int64_t ranks) {
      AveragedModel averaged(*model, ema(0.5));
      torch::optim::SGD optimizer(model->parameters(), 0.2);
      for (int64_t step = 0; step < 3; ++step) {
        const MixtureBatch batch(step);
        optimizer.zero_grad();
        const auto own = static_cast<size_t>(rank);
        (model(batch.inputs.tensor_split(ranks)[own]) - batch.targets.tensor_split(ranks)[own]).square().mean().backward();
        optimizer.step();
        averaged.update_parameters(*model);
      }
      const torch::NoGradGuard no_grad;
      const AveragedWeights swap(averaged, *model);
      std::map<std::string, Tensor> weights;
      for (const auto& item : model->named_parameters())
        weights[item.key()] =
            (is_dtensor(item.value()) ? DTensor(item.value().detach()).full_tensor() : item.value().detach()).clone();
      return weights;
    };
    auto whole = seeded_mixture(mixture_options()), model = seeded_mixture(mixture_options());
    const auto expected = averages_of(whole, 0, 1);
    const SplitMixture split(model, plan);
    for (const auto& [name, weights] : averages_of(model, split.data_rank(), plan.data_ranks()))
      EXPECT_TENSORS_CLOSE(weights, expected.at(name), 1e-5, 1e-5) << name;
  }
}

TEST(MixtureTraining, IsBitwiseTheSameTwice) {
  for (auto plan : sweep(mixture_cases(world_size()), 2)) {
    plan.steps = 4;
    plan.recomputes = true;
    if (!plan.divides_batch()) continue;
    const auto first = train_mixture_on_ranks(seeded_mixture(mixture_options()), plan);
    const auto second = train_mixture_on_ranks(seeded_mixture(mixture_options()), plan);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_EQ(first.norms, second.norms);
    for (const auto& [name, weights] : first.weights) EXPECT_TRUE(torch::equal(weights, second.weights.at(name))) << name;
  }
}

} // namespace
} // namespace tessera::testing::moe_test
