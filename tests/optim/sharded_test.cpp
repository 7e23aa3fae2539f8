// The optimizers on sharded models, beside one process that shards nothing.
#include <gmock/gmock.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/optim/shard_optimizer.h>
#include <tessera/optim/step.h>
#include <tessera/training/grad_scaler.h>

#include <tessera/tests/checkpoint/sharded_training.h>
#include <tessera/tests/optim/layouts.h>
#include <tessera/tests/optim/optimizers.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::sharded_test {
namespace {

class ShardedOptimizers : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
  void TearDown() override { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
};

/// A model under a strategy and one of the optimizers.
class Trained {
 public:
  Trained(const OptimizerCase& each, std::string strategy, uint64_t seed) : strategy_(std::move(strategy)), model_(seed) {
    if (strategy_ != "plain") shard(model_, strategy_);
    optimizer_ = each.make(Training::parameters_of(model_));
  }
  double step(int64_t number) {
    optimizer_->zero_grad();
    const auto loss = loss_of(model_, strategy_, number);
    loss.backward();
    clip_grad_norm_(Training::parameters_of(model_), 0.5);
    optimizer_->step();
    return mean_loss_over_ranks(loss);
  }
  StateDict state() { return state_dict(model_, *optimizer_); }
  TrainedModel& model() { return model_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  std::string strategy_;
  TrainedModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// The same with what a rank holds on the host or in files, group by group.
class Offloaded {
 public:
  Offloaded(const OptimizerCase& each, const OffloadPolicy& policy, uint64_t seed)
      : model_(std::make_unique<TrainedModel>(seed)) {
    const auto mesh = init_device_mesh(test_device_type(), {world_size()});
    const FullyShardOptions options{.offload = policy};
    for (const auto& block : model_->blocks->children()) fully_shard(*block, mesh, options);
    fully_shard(*model_, mesh, options);
    optimizer_ = each.make(Training::parameters_of(*model_));
  }
  double step(int64_t number) {
    optimizer_->zero_grad();
    const auto loss = loss_of(*model_, "full-ragged", number, test_device());
    loss.backward();
    clip_grad_norm_(Training::parameters_of(*model_), 0.5);
    tessera::step(*optimizer_);
    return mean_loss_over_ranks(loss);
  }
  TrainedModel& model() { return *model_; }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  std::unique_ptr<TrainedModel> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

void expect_equal_weights(TrainedModel& actual, TrainedModel& expected) {
  const auto others = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    const auto got = whole_tensor(item.value()), wanted = whole_tensor(others[item.key()]);
    EXPECT_TRUE(torch::allclose(got, wanted, 0, 1e-9)) << item.key() << " differs by " << (got - wanted).abs().max();
  }
}

template <typename Optimizer, typename Options>
OptimizerCase in_bf16(std::string name, const Options& options) {
  return {std::move(name), [options](const std::vector<at::Tensor>& parameters) {
            auto optimizer = std::make_unique<Optimizer>(parameters, options);
            optimizer->keep_moments_in(MomentDtype::kBFloat16, /*seed=*/7);
            return optimizer;
          }};
}

/// Their moments may be rounded otherwise where a gradient differs in its last bit, so that training is compared with training of
/// the same layout.
std::vector<OptimizerCase> cases_in_bf16() {
  return {in_bf16<FusedAdam>("FusedAdam in bf16", torch::optim::AdamOptions(0.01).weight_decay(0.1)),
          in_bf16<FusedAdamW>("FusedAdamW in bf16", torch::optim::AdamWOptions(0.01).weight_decay(0.1))};
}

TEST_F(ShardedOptimizers, TrainAsOneProcessDoes) {
  for (const auto& each : optimizer_cases()) {
    Trained plain(each, "plain", 1);
    std::vector<double> losses;
    for (int64_t step = 0; step < 10; ++step) losses.push_back(plain.step(step));
    for (const auto& strategy : sweep(strategies_and_layouts(), 3, [](const auto& name) { return name == "full-ragged"; })) {
      SCOPED_TRACE(each.name + " " + strategy);
      Trained sharded(each, strategy, 1);
      for (int64_t step = 0; step < 10; ++step) ASSERT_NEAR(sharded.step(step), losses[step], 1e-9) << "step " << step;
      expect_equal_weights(sharded.model(), plain.model());
    }
  }
}

struct Pair {
  OptimizerCase optimizer;
  std::string from, to;
};

std::vector<Pair> pairs() {
  std::vector<Pair> all;
  for (const auto& each : optimizer_cases()) {
    for (const auto& from : strategies_and_layouts()) {
      for (const auto& to : strategies_and_layouts()) all.push_back({each, from, to});
    }
  }
  return sweep(all, 20, [](const Pair& pair) { return are_default(pair.from, pair.to); });
}

TEST_F(ShardedOptimizers, StateDictsGoOverIntoOtherStrategies) {
  for (const auto& [each, from, to] : pairs()) {
    SCOPED_TRACE(each.name + " from " + from + " to " + to);
    Trained saved(each, from, 1), loaded(each, to, 2);
    for (int64_t step = 0; step < 2; ++step) saved.step(step);
    const auto whole = state_dict(saved.model(), saved.optimizer(), {.full_state_dict = true});
    auto target = loaded.state();
    load_state_dict(target, whole);
    for (int64_t step = 2; step < 4; ++step) ASSERT_NEAR(loaded.step(step), saved.step(step), 1e-9);
    expect_equal_weights(loaded.model(), saved.model());
  }
}

TEST_F(ShardedOptimizers, StateOfBeforeIsSharded) {
  for (const auto& each : optimizer_cases()) {
    SCOPED_TRACE(each.name);
    Trained expected(each, "plain", 1), trained(each, "plain", 1);
    for (int64_t step = 0; step < 2; ++step) {
      expected.step(step);
      trained.step(step);
    }
    trained.optimizer().zero_grad();
    shard(trained.model(), "full-ragged");
    shard_optimizer(trained.optimizer());
    for (int64_t step = 2; step < 4; ++step) {
      trained.optimizer().zero_grad();
      loss_of(trained.model(), "full-ragged", step).backward();
      clip_grad_norm_(Training::parameters_of(trained.model()), 0.5);
      trained.optimizer().step();
      expected.step(step);
    }
    expect_equal_weights(trained.model(), expected.model());
  }
}

TEST_F(ShardedOptimizers, NothingIsSentThatTheDocsDoNotName) {
  const auto mesh = init_device_mesh(test_device_type(), {world_size()});
  struct Sent {
    std::string optimizer;
    int64_t all_reduces, all_to_alls;
  };
  const std::vector<Sent> all{{"FusedAdamW", 0, 0}, {"FusedSGD momentum", 0, 0}, {"Lion", 0, 0}, {"Lamb", 1, 0},
                              {"Adafactor", 2, 0},  {"AdamW8bit", 1, 0},         {"Muon", 0, 2}};
  const auto cases = optimizer_cases();
  for (const auto& [name, all_reduces, all_to_alls] : all) {
    SCOPED_TRACE(name);
    Trained trained(*std::ranges::find(cases, name, &OptimizerCase::name), "full-ragged", 1);
    loss_of(trained.model(), "full-ragged", 0).backward();
    auto& counters = mesh.communicator()->counters();
    counters.reset();
    trained.optimizer().step();
    EXPECT_EQ(counters.get(CollectiveKind::kAllReduce).calls, world_size() > 1 ? all_reduces : 0);
    EXPECT_EQ(counters.get(CollectiveKind::kAllToAll).calls, world_size() > 1 ? all_to_alls : 0);
    EXPECT_EQ(counters.get(CollectiveKind::kAllGather).calls + counters.get(CollectiveKind::kReduceScatter).calls, 0);
  }
}

TEST_F(ShardedOptimizers, StepsOfTheSameGradientsAreThoseOfOneProcess) {
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  for (const auto& each : optimizer_cases()) {
    if (each.name.starts_with("Lamb") || each.name.starts_with("Adafactor")) continue; // whose sums go over the ranks
    for (const auto& [mesh, placements] : layouts(37, 24)) {
      SCOPED_TRACE(each.name + " " + to_string(placements));
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{3});
      auto whole = torch::randn({37, 24}, generator).to(mesh.device()).requires_grad_();
      auto parts = distribute_tensor(whole.detach().clone(), mesh, placements).requires_grad_();
      const auto alone = each.make({whole}), sharded = each.make({parts});
      for (int step = 0; step < 3; ++step) {
        whole.mutable_grad() = torch::randn({37, 24}, generator).to(mesh.device());
        parts.mutable_grad() = distribute_tensor(whole.grad(), mesh, placements);
        alone->step();
        sharded->step();
      }
      // A fused kernel rounds the last elements of a part, which fill no vector register, in another way.
      const double rounding = each.name.starts_with("Fused") ? 1e-6 : 0;
      const auto got = whole_tensor(parts), expected = whole.detach().cpu();
      EXPECT_TRUE(torch::allclose(got, expected, rounding, rounding)) << (got - expected).abs().max();
    }
  }
}

TEST_F(ShardedOptimizers, StepWhatLiesOnTheHostAndInFiles) {
  for (const auto& each : optimizer_cases()) {
    Trained plain(each, "plain", 1);
    std::vector<double> losses;
    for (int64_t step = 0; step < 6; ++step) losses.push_back(plain.step(step));
    for (const bool in_files : {false, true}) {
      SCOPED_TRACE(each.name + (in_files ? " in files" : " on the host"));
      const TemporaryFolder folder;
      const auto offloaded = [&](uint64_t seed) {
        return Offloaded(each, in_files ? offload_to_files(folder.path().string(), false) : offload_to_host(false), seed);
      };
      auto saved = offloaded(1), loaded = offloaded(2);
      for (int64_t step = 0; step < 3; ++step) ASSERT_NEAR(saved.step(step), losses[step], 1e-9) << "step " << step;
      const auto whole = state_dict(saved.model(), saved.optimizer(), {.full_state_dict = true});
      auto target = state_dict(loaded.model(), loaded.optimizer());
      load_state_dict(target, whole);
      for (int64_t step = 3; step < 6; ++step) ASSERT_NEAR(loaded.step(step), losses[step], 1e-9) << "step " << step;
    }
  }
}

/// Group by group out of files, and resumed: the numbers of a model that stays in memory.
TEST_F(ShardedOptimizers, MomentsInBf16MayLieInFiles) {
  if (test_device_type() != torch::kCPU) GTEST_SKIP() << "these moments are for the CPU";
  for (const auto& each : cases_in_bf16()) {
    SCOPED_TRACE(each.name);
    const TemporaryFolder folder;
    Trained plain(each, "full-ragged", 1);
    Offloaded saved(each, offload_to_files(folder.path().string(), false), 1),
        loaded(each, offload_to_files(folder.path().string(), false), 2);
    for (int64_t step = 0; step < 3; ++step) ASSERT_NEAR(saved.step(step), plain.step(step), 1e-9) << "step " << step;
    const auto whole = state_dict(saved.model(), saved.optimizer(), {.full_state_dict = true});
    auto target = state_dict(loaded.model(), loaded.optimizer());
    load_state_dict(target, whole);
    for (int64_t step = 3; step < 6; ++step) ASSERT_NEAR(loaded.step(step), plain.step(step), 1e-9) << "step " << step;
    expect_equal_weights(loaded.model(), plain.model());
  }
}

TEST_F(ShardedOptimizers, RefuseTheStateOfAnotherOne) {
  namespace optim = torch::optim;
  const std::vector<OptimizerCase> all{optimizer_case<optim::AdamW>("AdamW", optim::AdamWOptions(0.01)),
                                       optimizer_case<optim::SGD>("SGD", optim::SGDOptions(0.01)),
                                       optimizer_case<Lion>("Lion", LionOptions(0.01)),
                                       optimizer_case<Lamb>("Lamb", LambOptions(0.02)),
                                       optimizer_case<Adafactor>("Adafactor", AdafactorOptions(0.05)),
                                       optimizer_case<AdamW8bit>("AdamW8bit", AdamW8bitOptions(0.01)),
                                       muon_case("Muon", MuonAdjustLr::kOriginal)};
  for (size_t i = 0; i < all.size(); ++i) {
    const auto &there = all[i], &here = all[(i + 1) % all.size()];
    SCOPED_TRACE(there.name + " into " + here.name);
    Trained saved(there, "full-ragged", 1), loaded(here, "full-ragged", 1);
    saved.step(0);
    const auto whole = state_dict(saved.model(), saved.optimizer(), {.full_state_dict = true});
    auto target = loaded.state();
    EXPECT_THROWS_WITH(load_state_dict(target, whole),
                       "holds the state of another optimizer than " + here.name + ": " + there.name);
  }
}

TEST_F(ShardedOptimizers, AScalersInfinityChangesNothing) {
  auto cases = optimizer_cases();
  if (test_device_type() == torch::kCPU) {
    for (auto& each : cases_in_bf16()) cases.push_back(std::move(each));
  }
  for (const auto& each : cases) {
    SCOPED_TRACE(each.name);
    Trained expected(each, "full-ragged", 1), scaled(each, "full-ragged", 1);
    GradScaler scaler({.init_scale = 8});
    for (int64_t step = 0; step < 3; ++step) {
      const bool overflows = step == 1;
      scaled.optimizer().zero_grad();
      scaler.scale(loss_of(scaled.model(), "full-ragged", step)).backward();
      if (overflows) Training::parameters_of(scaled.model())[0].grad().mul_(std::numeric_limits<double>::infinity());
      scaler.unscale_(scaled.optimizer());
      if (!overflows) clip_grad_norm_(Training::parameters_of(scaled.model()), 0.5);
      EXPECT_EQ(scaler.step(scaled.optimizer()), !overflows);
      scaler.update();
      if (!overflows) expected.step(step);
    }
    expect_equal_weights(scaled.model(), expected.model());
  }
}

} // namespace
} // namespace tessera::testing::sharded_test
