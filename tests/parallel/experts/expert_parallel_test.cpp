// Experts on several ranks: who has which, what is refused, checkpoints, and what crosses it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/summary.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/experts/mixture_training.h>
#include <tessera/tests/support/sweep.h>

#include <cmath>

namespace tessera::testing::expert_parallel_test {
namespace {

using torch::Tensor;

MoEOptions options_with(ExpertStorage storage) {
  auto options = mixture_options();
  options.storage = storage;
  return options;
}

/// 8 ranks, as threads of this process.
TEST(ExpertParallel, TrainsOnEightRanksAsOnOne) {
  if (world_size() > 1) return;
  for (auto plan : sweep(mixture_cases(8), 2)) {
    for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
      plan.steps = 5;
      plan.recomputes = plan.experts == 2;
      SCOPED_TRACE(plan.text());
      const auto options = options_with(storage);
      const auto expected = train_mixture_alone(options, plan);
      std::vector<Mixture> models; // which threads would draw from one generator
      for (int i = 0; i < 8; ++i) models.push_back(seeded_mixture(options));
      run_ranks_as_threads(
          8, [&] { expect_same_mixture(train_mixture_on_ranks(models[static_cast<size_t>(world_rank())], plan), expected); });
    }
  }
}

TEST(ExpertParallel, TrainsUnderEveryStrategyAndLayout) {
  // Ranks may have made other numbers of models before, for example as stages of a pipeline.
  for (int rank = 0; rank < world_rank(); ++rank) process_context().next_number();
  for (const auto strategy : {Strategy::kNoShard, Strategy::kZero1, Strategy::kZero2, Strategy::kFullShard}) {
    for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
      for (auto plan : sweep(mixture_cases(world_size()), 2)) {
        if (plan.replicas > 1) continue;
        plan.steps = 3;
        FullyShardOptions sharding;
        sharding.strategy = strategy;
        sharding.layout = layout;
        SCOPED_TRACE(c10::str(row_of(strategy).name, ", ", plan.text()));
        expect_same_mixture(train_mixture_on_ranks(seeded_mixture(mixture_options()), plan, sharding),
                            train_mixture_alone(mixture_options(), plan));
      }
    }
  }
}

TEST(ExpertParallel, TrainsInLowPrecision) {
  auto options = mixture_options();
  options.bias_rate = 0; // whose steps have the signs of small differences
  options.route.top_k = kMixtureExperts;
  for (auto plan : sweep(mixture_cases(world_size()), 2)) {
    plan.steps = 5;
    FullyShardOptions sharding;
    sharding.mixed_precision.param_dtype = torch::kBFloat16;
    sharding.mixed_precision.reduce_dtype = torch::kFloat;
    SCOPED_TRACE(plan.text());
    expect_same_mixture(train_mixture_on_ranks(seeded_mixture(options), plan, sharding), train_mixture_alone(options, plan),
                        0.02);
  }
}

/// Each expert as a group of its own.
TEST(ExpertParallel, ShardsEachExpertByItself) {
  const auto options = options_with(ExpertStorage::kModules);
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  const MixtureCase plan{.shards = world_size(), .steps = 4};
  if (!plan.divides_batch()) return;
  const auto expected = train_mixture_alone(options, plan);
  for (int64_t ranks = 1; ranks <= world_size(); ++ranks) {
    if (world_size() % ranks != 0) continue;
    auto model = seeded_mixture(options);
    const auto experts = expert_mesh(mesh, ranks);
    expert_parallel(*model, experts["ep"], {.tokens = mesh});
    for (auto* layer : moe_layers(*model)) {
      for (const auto& expert : layer->experts()->children()) fully_shard(*expert, experts["efsdp"]);
    }
    fully_shard(*model, mesh);
    const auto got = train_mixture(model, plan, world_rank(), world_size());
    for (const auto& [name, weights] : got.weights) EXPECT_TENSORS_CLOSE(weights, expected.weights.at(name), 1e-5, 1e-5) << name;
  }
}

/// What this rank's layer gives for its rows, and the gradients of this rank's experts.
struct LayerResult {
  Tensor y, x, router;
  std::map<std::string, Tensor> experts;
};

LayerResult run_layer(MoE& moe, const Tensor& rows) {
  const auto x = rows.clone().requires_grad_();
  const auto y = moe(x);
  y.sin().sum().backward();
  LayerResult result{y.detach(), x.grad(), moe->router().weight.grad(), {}};
  for (const auto& item : moe->experts()->named_parameters()) {
    const auto gradient = item.value().grad();
    result.experts[item.key()] = is_dtensor(gradient) ? DTensor(gradient).full_tensor() : gradient;
  }
  return result;
}

TEST(ExpertParallel, TakesRanksWithoutTokensAndAllTokensAtOneExpert) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"ep"});
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    for (const bool at_one : {false, true}) {
      SCOPED_TRACE(c10::str(static_cast<int>(storage), at_one));
      auto options = options_with(storage);
      options.losses = {};
      torch::manual_seed(6);
      MoE whole(options);
      torch::manual_seed(6);
      MoE moe(options);
      auto rows = torch::randn({10, kMixtureWidth});
      if (at_one) rows = rows[0].repeat({10, 1});
      const auto expected = run_layer(whole, rows);
      expert_parallel(*moe, mesh);
      const auto first = world_rank() == 0 ? 0 : 10; // the first rank has all
      const auto got = run_layer(moe, rows.slice(0, first, 10));
      EXPECT_TENSORS_CLOSE(got.y, expected.y.slice(0, first, 10), 1e-5, 1e-6);
      EXPECT_TENSORS_CLOSE(got.x, expected.x.slice(0, first, 10), 1e-5, 1e-6);
      if (world_rank() == 0) EXPECT_TENSORS_CLOSE(got.router, expected.router, 1e-5, 1e-6);
      EXPECT_EQ(got.experts.size(),
                storage == ExpertStorage::kStacked ? 3U : static_cast<size_t>(3 * kMixtureExperts / world_size()));
      for (const auto& [name, gradient] : got.experts) {
        ASSERT_TRUE(gradient.defined()) << name;
        EXPECT_TENSORS_CLOSE(gradient, expected.experts.at(name), 1e-5, 1e-6) << name;
      }
    }
  }
}

/// 4 moves of rows each way at most, and E + n counts; with recompute the first ones twice.
TEST(ExpertParallel, SendsWhatTheFormulaSays) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"ep"});
  const int64_t tokens = 10, ranks = world_size();
  auto options = mixture_options();
  options.losses = {};
  torch::manual_seed(6);
  MoE moe(options);
  expert_parallel(*moe, mesh);
  const auto x = torch::randn({tokens, kMixtureWidth}).requires_grad_();
  auto& counters = mesh.communicator()->counters();
  for (const bool recomputes : {false, true}) {
    counters.reset();
    const auto y = recomputes ? recompute(moe, x) : moe(x);
    const auto received = DTensor(from_local(moe->statistics().counts, mesh, {Partial{}})).full_tensor();
    const auto own = kMixtureExperts / ranks;
    y.sum().backward();
    const auto rows = std::max(2 * tokens, received.slice(0, world_rank() * own, (world_rank() + 1) * own).sum().item<int64_t>());
    const auto count = counters.get(CollectiveKind::kAllToAll);
    const int64_t moves = recomputes ? 6 : 4, times = recomputes ? 2 : 1;
    const auto counts = (kMixtureExperts + ranks) * 8;
    EXPECT_EQ(count.calls, ranks == 1 ? 0 : moves + times);
    EXPECT_EQ(count.bytes, ranks == 1 ? 0 : moves * rows * kMixtureWidth * 4 + times * counts);
  }
}

/// AdamW's steps on some ranks, and on others after a checkpoint.
TEST(ExpertParallel, ContinuesOnAnyNumberOfRanks) {
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    const auto options = options_with(storage);
    const StateDictOptions flat{.flatten_optimizer_state_dict = true};
    const auto step = [](Mixture& model, torch::optim::Optimizer& optimizer, int64_t rank, int64_t ranks, int64_t number) {
      const MixtureBatch batch(number);
      optimizer.zero_grad();
      const auto own = static_cast<size_t>(rank);
      (model(batch.inputs.tensor_split(ranks)[own]) - batch.targets.tensor_split(ranks)[own]).square().mean().backward();
      update_expert_bias(*model);
      const auto norm = clip_grad_norm_(*model, 0.5).item<double>();
      optimizer.step();
      return norm;
    };
    const SharedFolder folder;
    double expected = 0;
    bool is_first = true;
    for (const auto& plan : mixture_cases(world_size())) {
      if (!plan.divides_batch()) continue;
      SCOPED_TRACE(plan.text());
      torch::manual_seed(is_first ? 11 : 12);
      Mixture model(options);
      const SplitMixture split(model, plan);
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
      const auto run = [&](int64_t number) { return step(model, optimizer, split.data_rank(), plan.data_ranks(), number); };
      if (is_first) {
        for (int64_t i = 0; i < 3; ++i) run(i);
        checkpoint::save(state_dict(*model, optimizer, flat), folder.path() / "three");
        run(3);
        expected = run(4);
      } else {
        checkpoint::load(state_dict(*model, optimizer, flat), folder.path() / "three");
        run(3);
        EXPECT_NEAR(run(4), expected, 1e-4);
      }
      is_first = false;
    }
  }
}

/// Stacked or by themselves: saved on some ranks, loaded on others.
TEST(ExpertParallel, LoadsACheckpointOnAnyNumberOfRanks) {
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    const auto options = options_with(storage);
    const SharedFolder folder;
    const auto cases = mixture_cases(world_size());
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE(c10::str(cases[i].text(), " to ", cases[(i + 1) % cases.size()].text()));
      auto saved = seeded_mixture(options);
      const SplitMixture on(saved, cases[i]);
      const auto path = folder.path() / std::to_string(i);
      checkpoint::save(state_dict(*saved), path);
      torch::manual_seed(99);
      Mixture loaded(options);
      const SplitMixture other(loaded, cases[(i + 1) % cases.size()]);
      checkpoint::load(state_dict(*loaded), path);
      const auto expected = seeded_mixture(options)->named_parameters();
      const torch::NoGradGuard no_grad;
      for (const auto& item : loaded->named_parameters()) {
        const auto whole = is_dtensor(item.value()) ? DTensor(item.value().detach()).full_tensor() : item.value();
        EXPECT_TRUE(torch::equal(whole, expected[item.key()])) << item.key();
      }
    }
  }
}

TEST(ExpertParallel, MissesNoExpertOfACheckpoint) {
  const auto options = options_with(ExpertStorage::kModules);
  const SharedFolder folder;
  auto saved = seeded_mixture(options);
  const auto plan = mixture_cases(world_size()).back();
  const SplitMixture on(saved, plan);
  auto state = state_dict(*saved);
  state.erase_if([](const auto& entry) { return entry.name.find("first.experts.0.up") != std::string::npos; });
  checkpoint::save(state, folder.path() / "part");
  auto loaded = seeded_mixture(options);
  const SplitMixture other(loaded, plan);
  EXPECT_THROWS_WITH(checkpoint::load(state_dict(*loaded), folder.path() / "part"), "first.experts.0.up.weight");
}

TEST(ExpertParallel, MaterializesTheWeightsOfOneProcess) {
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    auto options = options_with(storage);
    options.shared_hidden = 8;
    torch::manual_seed(11);
    MoE whole(options);
    const auto expected = whole->named_parameters();
    for (const auto& plan : mixture_cases(world_size())) {
      SCOPED_TRACE(plan.text());
      torch::manual_seed(11);
      auto model = on_meta([&] { return MoE(options); });
      const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"}), experts = expert_mesh(mesh, plan.experts);
      expert_parallel(*model, experts["ep"], {.tokens = mesh});
      fully_shard(*model->experts(), experts["efsdp"]);
      fully_shard(*model, mesh);
      const auto unwritten = materialize(*model, [](torch::nn::Module& module) {
        if (auto* moe = module.as<MoEImpl>()) moe->reset_parameters();
      });
      EXPECT_EQ(unwritten, std::vector<std::string>{"router.bias"});
      const torch::NoGradGuard no_grad;
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(torch::equal(DTensor(item.value().detach()).full_tensor(), expected[item.key()])) << item.key();
    }
  }
}

// --- what is refused

TEST(ExpertParallel, RefusesExpertsThatDoNotDivide) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"ep"});
  MoE moe(MoEOptions{.width = 4, .hidden = 4, .experts = 5});
  if (world_size() > 1)
    EXPECT_THROWS_WITH(expert_parallel(*moe, mesh), c10::str("the 5 experts of experts do not divide among the ", world_size(),
                                                             " ranks of ", mesh.to_string(), "; numbers of ranks that do: 1, 5"));
  torch::nn::ModuleList empty;
  EXPECT_THROWS_WITH(expert_parallel(*empty, mesh), "has no experts");
  torch::nn::Linear uneven(12, 24);
  uneven->register_parameter("other", torch::zeros({12, 2}));
  EXPECT_THROWS_WITH(expert_parallel(*uneven, mesh),
                     "the parameter other has the shape [12, 2], but others are stacked weights of 24 experts");
  EXPECT_THROWS_WITH(expert_parallel(*moe, DeviceMesh()), "the mesh must have one dim");
}

TEST(ExpertParallel, RefusesRanksWithOtherExperts) {
  if (world_size() == 1) return;
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"ep"});
  MoE moe(MoEOptions{.width = 4, .hidden = world_rank() == 0 ? 4 : 8, .experts = 12});
  EXPECT_THROWS_WITH(expert_parallel(*moe, mesh), "differ: ");
  EXPECT_EQ(moe->parameters()[1].size(0), 12) << "nothing has changed";
}

TEST(ExpertParallel, NamesTheRankOfAnExpertThatIsRead) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"ep"});
  MoE moe(options_with(ExpertStorage::kModules));
  expert_parallel(*moe, mesh);
  EXPECT_EQ(moe->experts()->parameters().size(), static_cast<size_t>(3 * kMixtureExperts / world_size()));
  auto& list = *moe->experts()->as<torch::nn::ModuleList>();
  if (world_rank() != 0)
    EXPECT_THROWS_WITH(list.ptr<FeedForwardImpl>(0)->forward(torch::randn({2, kMixtureWidth})),
                       "experts.0.gate.weight is read, but expert 0 is on rank 0");
  EXPECT_THROWS_WITH(expert_parallel(*moe, mesh), "is split over ranks already");
}

TEST(ExpertParallel, RefusesShardingThatWouldMixExperts) {
  if (world_size() != 4) return;
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"efsdp", "ep"});
  const auto flat = mesh.flatten("dp");
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    const auto options = options_with(storage);
    auto model = seeded_mixture(options);
    EXPECT_THROWS_WITH(expert_parallel(*model, mesh["ep"]), "say with ExpertParallelOptions::tokens");
    EXPECT_THROWS_WITH(expert_parallel(*model, mesh["ep"], {.tokens = mesh["efsdp"]}), "is not among those with tokens");
    expert_parallel(*model, mesh["ep"], {.tokens = mesh});
    EXPECT_THROWS_WITH(fully_shard(*model, flat), "Call fully_shard of the experts before that of what holds them");
    EXPECT_THROWS_WITH(fully_shard(*model->first->experts(), flat), "over the ranks that have the same experts");
    EXPECT_THROWS_WITH(fully_shard(*model->first, mesh["efsdp"]), "and router.weight is none");
    EXPECT_THROWS_WITH(parallelize(*model, mesh["efsdp"], {{"first.experts", Colwise{}}}), "first.experts");
  }
  auto model = seeded_mixture(mixture_options());
  expert_parallel(*model, mesh["ep"], {.tokens = mesh});
  const auto alone = make_device_mesh(torch::kCPU, {1}, {world_rank()});
  EXPECT_THROWS_WITH(fully_shard(*model->first->experts(), alone), "these are 2 ranks in all, but 4 have tokens");
  auto sharded = seeded_mixture(mixture_options());
  fully_shard(*sharded, flat);
  EXPECT_THROWS_WITH(expert_parallel(*sharded, mesh["ep"], {.tokens = mesh}),
                     "call expert_parallel before parallelize and fully_shard");
}

TEST(ExpertParallel, RefusesExpertsThatNothingDivides) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  auto model = seeded_mixture(mixture_options());
  expert_parallel(*model, mesh);
  for (auto* dense :
       std::vector<torch::nn::Module*>{&*model->stem, &*model->head, &model->first->router(), &model->second->router()})
    fully_shard(*dense, mesh);
  const auto frozen = std::vector<torch::nn::Module*>{&*model->up, &*model->down, &*model->norm};
  for (auto* dense : frozen) fully_shard(*dense, mesh);
  model(torch::randn({2, 3, 6})).sum().backward();
  EXPECT_THROWS_WITH(clip_grad_norm_(*model, 1), "first.experts.up");
}

TEST(ExpertParallel, RefusesActivationsOfUnknownRanks) {
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"tp"});
  auto model = seeded_mixture(mixture_options());
  parallelize(*model, mesh, {});
  EXPECT_THROWS_WITH(model(torch::randn({2, 3, 6})), "with ExpertParallelOptions::tensor_parallel");
  auto options = mixture_options();
  options.losses.scope = BalanceScope::kSequence;
  MoE moe(options);
  EXPECT_THROWS_WITH(moe(torch::randn({4, kMixtureWidth})), "needs x [rows, time, width], but it has 2 dims");
}

TEST(ExpertParallel, IsSummarized) {
  const auto plan = mixture_cases(world_size()).back();
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    auto model = seeded_mixture(options_with(storage));
    const SplitMixture split(model, plan);
    const auto text = summary(*model).to_string();
    EXPECT_NE(text.find("experts"), std::string::npos);
    EXPECT_EQ(text.find("trains apart"), std::string::npos) << text;
    model(torch::randn({4, 3, 6})).sum().backward();
    EXPECT_NE(explain(*model).to_string().find("experts"), std::string::npos);
  }
}

TEST(ExpertMesh, PutsDifferentExpertsOnNeighbours) {
  if (world_size() != 4) return;
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"shard", "tp"});
  const auto experts = expert_mesh(mesh, 2);
  EXPECT_EQ(experts.dim_names(), (std::vector<std::string>{"efsdp", "ep"}));
  EXPECT_EQ(experts["ep"].ranks(), (std::vector<int64_t>{world_rank() / 2 * 2, world_rank() / 2 * 2 + 1}));
  EXPECT_THROWS_WITH(expert_mesh(mesh, 3), "3 ranks of experts do not divide the 4 of");
}

} // namespace
} // namespace tessera::testing::expert_parallel_test
