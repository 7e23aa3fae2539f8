// A trainer's step beside a hand-written loop in one process.
#include <tessera/tessera.h>

#include <cmath>
#include <optional>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/training/loop/token_training.h>

namespace tessera::testing::trainer_step_test {
namespace {

constexpr int64_t kRows = 41, kTogether = 12; // 12 divides by 1 to 4; the last micro-batch has 5 rows

TokenSource source() { return {kRows, kTogether, world_rank(), world_size()}; }
TokenSource whole_source() { return {kRows, kTogether, 0, 1}; }

/// Micro-batches of one process, whose norm is that of the step; both trainings from the same weights.
struct Pair {
  Net net = double_net(), plain = double_net();
  std::optional<torch::optim::SGD> optimizer, of_plain;

  void make_optimizers(double lr = 0.3) {
    optimizer.emplace(net->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
    of_plain.emplace(plain->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
  }
};

/// Of two models that are sharded.
bool same_weights(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto of_b = b.named_parameters();
  for (const auto& item : a.named_parameters()) {
    if (!torch::equal(full(item.value()), full(of_b[item.key()]))) return false;
  }
  return true;
}

TEST(TrainerStep, IsThatOfOneProcessWithTheWholeBatchUnderEveryStrategy) {
  for (const auto& strategy : sweep(strategies(), 4, is_default)) {
    for (const int64_t micro_batches : {1, 2, 3}) {
      SCOPED_TRACE(c10::str(strategy.name, ", ", micro_batches, " micro-batches"));
      Pair pair;
      shard_model(pair.net, strategy);
      pair.make_optimizers();
      Trainer<Tokens> trainer(*pair.net, *pair.optimizer, {.micro_batches = micro_batches, .max_grad_norm = 0.5});
      trainer.loss([&](const Tokens& batch) { return token_loss_sum(pair.net, batch); }).data(source());
      auto whole = whole_source();
      for (int64_t step = 0; step < 5; ++step) {
        const auto rows = rows_of_step(whole, micro_batches);
        const auto expected = plain_step(pair.plain, *pair.of_plain, rows, 0.5);
        const auto got = trainer.step();
        EXPECT_NEAR(got.loss, expected.loss, 1e-9) << "step " << step;
        EXPECT_NEAR(got.grad_norm, expected.norm, 1e-9) << "step " << step;
        EXPECT_NEAR(got.clip_coefficient, std::min(1.0, 0.5 / (expected.norm + 1e-6)), 1e-9);
        EXPECT_EQ(got.rows, rows.rows());
        EXPECT_EQ(got.count, rows.counted());
        EXPECT_EQ(got.step, step + 1);
        EXPECT_GE(got.max_loss, got.loss - 1e-9);
      }
      EXPECT_LT(parameter_difference(*pair.net, *pair.plain), 1e-9);
    }
  }
}

TEST(TrainerStep, TellsTheEndOfAnEpochAndGoesIntoTheNext) {
  Pair pair;
  shard_model(pair.net, strategies().front());
  pair.make_optimizers();
  Trainer<Tokens> trainer(*pair.net, *pair.optimizer, {.micro_batches = 3});
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(pair.net, batch); }).data(source());
  std::vector<int64_t> micro_batches, rows;
  std::vector<bool> ends;
  for (int64_t step = 0; step < 4; ++step) {
    const auto result = trainer.step();
    micro_batches.push_back(result.micro_batches);
    rows.push_back(result.rows);
    ends.push_back(result.ends_epoch);
    EXPECT_EQ(result.epochs, (step + 1) / 2);
  }
  EXPECT_EQ(micro_batches, (std::vector<int64_t>{3, 1, 3, 1}));
  EXPECT_EQ(rows[0], 36);
  EXPECT_EQ(rows[2], 36);
  EXPECT_EQ(ends, (std::vector<bool>{false, true, false, true}));
}

/// The sum and the mean are one loss; k micro-batches are one batch.
TEST(TrainerStep, AccumulatesToTheSameWeightsHoweverARankSplitsItsBatch) {
  const auto mine = [](int64_t step, int64_t parts) { // other counts on each rank and in each part
    std::vector<Tokens> batches;
    for (int64_t part = 0; part < parts; ++part) {
      std::vector<int64_t> rows;
      for (int64_t row = part; row < 12; row += parts) rows.push_back(100 * step + 12 * world_rank() + row);
      batches.push_back(token_rows(rows));
    }
    return batches;
  };
  std::vector<std::vector<double>> losses;
  std::optional<Net> first;
  for (const int64_t parts : {1, 2, 3, 4}) {
    for (const bool is_mean : {false, true}) {
      auto net = double_net();
      shard_model(net, strategies().front());
      torch::optim::SGD optimizer(net->parameters(), 0.2);
      Trainer<Tokens> trainer(*net, optimizer);
      trainer.loss([&](const Tokens& batch) -> Loss {
        if (is_mean) return LossMean{token_losses(net, batch, at::Reduction::Mean)};
        return token_loss_sum(net, batch);
      });
      losses.emplace_back();
      for (int64_t step = 0; step < 3; ++step) losses.back().push_back(trainer.step(mine(step, parts)).loss);
      for (size_t step = 0; step < 3; ++step) EXPECT_NEAR(losses.back()[step], losses.front()[step], 1e-9) << parts;
      if (first) EXPECT_LT(parameter_difference(*net, **first), 1e-9) << parts;
      if (!first) {
        first = double_net();
        const torch::NoGradGuard no_grad;
        for (auto& item : (*first)->named_parameters()) item.value().copy_(full(net->named_parameters()[item.key()]));
      }
    }
  }
}

/// (loss / n).backward() in a plain loop, in float.
TEST(TrainerStep, IsToTheBitAPlainLoopWhereMicroBatchesCountAlike) {
  for (const int64_t micro_batches : {1, 3, 4}) {
    SCOPED_TRACE(micro_batches);
    auto net = make_net(), twin = make_net();
    shard_model(net, strategies().front());
    shard_model(twin, strategies().front());
    torch::optim::AdamW optimizer(net->parameters(), 1e-2), of_twin(twin->parameters(), 1e-2);
    Trainer<torch::Tensor> trainer(*net, optimizer, {.max_grad_norm = 1});
    trainer.loss([&](const torch::Tensor& tokens) { return LossMean{loss_of(net, tokens)}; });
    for (int64_t step = 0; step < 3; ++step) {
      std::vector<torch::Tensor> batches;
      for (int64_t i = 0; i < micro_batches; ++i) batches.push_back(own_batch(10 * step + i));
      of_twin.zero_grad();
      double loss = 0;
      for (int64_t i = 0; i < micro_batches; ++i) {
        std::optional<NoSync> scope;
        if (i + 1 < micro_batches) scope.emplace(*twin);
        const auto one = loss_of(twin, batches[static_cast<size_t>(i)]);
        (micro_batches == 1 ? one : one / static_cast<double>(micro_batches)).backward();
        loss += one.item<double>();
      }
      clip_grad_norm_(*twin, 1.0);
      of_twin.step();
      const auto result = trainer.step(batches);
      EXPECT_TRUE(same_weights(*net, *twin));
      const auto mean = all_reduce({{"loss", loss}}, world_mesh(), ReduceOp::kSum).at("loss");
      EXPECT_NEAR(result.loss, mean / static_cast<double>(micro_batches * world_size()), 1e-12);
    }
  }
}

/// Each row counts alike, however the last rows of an epoch are dealt out: what train_resnet computes.
TEST(TrainerStep, IsToTheBitAPlainLoopWhereMicroBatchesAreUneven) {
  auto net = make_net(), twin = make_net();
  shard_model(net, strategies().front());
  shard_model(twin, strategies().front());
  torch::optim::AdamW optimizer(net->parameters(), 1e-2), of_twin(twin->parameters(), 1e-2);
  Trainer<torch::Tensor> trainer(*net, optimizer, {.max_grad_norm = 1});
  trainer.loss([&](const torch::Tensor& tokens) { return LossMean{loss_of(net, tokens)}; });
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<torch::Tensor> batches;
    double mine = 0;
    for (int64_t i = 0; i < 3; ++i) {
      batches.push_back(global_batch(10 * step + i).slice(0, 0, 1 + (world_rank() + i + step) % 4));
      mine += static_cast<double>(batches.back().size(0));
    }
    const auto rows = all_reduce({{"rows", mine}}, world_mesh(), ReduceOp::kSum).at("rows");
    RunningMeans means({"loss"});
    of_twin.zero_grad();
    for (size_t i = 0; i < batches.size(); ++i) {
      std::optional<NoSync> scope;
      if (i + 1 < batches.size()) scope.emplace(*twin);
      const auto loss = loss_of(twin, batches[i]);
      const auto count = static_cast<double>(batches[i].size(0));
      (loss * (count * static_cast<double>(world_size()) / rows)).backward();
      means.add("loss", loss.item<double>(), count);
    }
    const auto norm = clip_grad_norm_(*twin, 1.0).item<double>();
    of_twin.step();
    const auto result = trainer.step(batches);
    EXPECT_EQ(result.loss, means.means(world_mesh()).at("loss"));
    EXPECT_EQ(result.grad_norm, norm);
    EXPECT_TRUE(same_weights(*net, *twin));
  }
}

TEST(TrainerStep, IsToTheBitAPlainLoopInHalfPrecision) {
  if (!tests_the_cpu()) return;
  auto strategy = strategies().front();
  strategy.options.mixed_precision.param_dtype = torch::kHalf;
  strategy.options.mixed_precision.reduce_dtype = torch::kFloat;
  const GradScalerOptions options{
      .init_scale = 65536.0 * 65536, .growth_interval = 2, .mesh = world_mesh()}; // it overflows at first
  auto net = make_net(), twin = make_net();
  shard_model(net, strategy);
  shard_model(twin, strategy);
  torch::optim::SGD optimizer(net->parameters(), 0.1), of_twin(twin->parameters(), 0.1);
  GradScaler scaler(options);
  Trainer<torch::Tensor> trainer(*net, optimizer, {.micro_batches = 2, .max_grad_norm = 0.5, .scaler = options});
  trainer.loss([&](const torch::Tensor& tokens) { return LossMean{loss_of(net, tokens)}; });
  int64_t skipped = 0, stepped = 0;
  for (int64_t step = 0; step < 30; ++step) {
    const std::vector<torch::Tensor> batches{own_batch(2 * step), own_batch(2 * step + 1)};
    of_twin.zero_grad();
    for (size_t i = 0; i < 2; ++i) {
      std::optional<NoSync> scope;
      if (i == 0) scope.emplace(*twin);
      scaler.scale(loss_of(twin, batches[i]) / 2.0).backward();
    }
    scaler.unscale_(of_twin);
    clip_grad_norm_(*twin, 0.5);
    const auto scale = scaler.get_scale();
    const bool has_stepped = scaler.step(of_twin);
    scaler.update();
    const auto result = trainer.step(batches);
    EXPECT_EQ(result.loss_scale, scale);
    EXPECT_EQ(result.outcome, has_stepped ? StepOutcome::kStepped : StepOutcome::kSkipped);
    EXPECT_TRUE(same_weights(*net, *twin)) << "step " << step;
    ++(has_stepped ? stepped : skipped);
  }
  EXPECT_GT(skipped, 3);
  EXPECT_GT(stepped, 3);
}

TEST(TrainerStep, CountsNothingOfARankWithoutTargets) {
  for (const auto& strategy : sweep(strategies(), 2, is_default)) {
    SCOPED_TRACE(strategy.name);
    Pair pair;
    shard_model(pair.net, strategy);
    pair.make_optimizers();
    Trainer<Tokens> trainer(*pair.net, *pair.optimizer);
    trainer.loss([&](const Tokens& batch) { return token_loss_sum(pair.net, batch); });
    for (int64_t step = 0; step < 3; ++step) {
      auto mine = token_rows({10 * step + world_rank() + 1});
      std::vector<int64_t> others;
      for (int64_t rank = 0; rank < std::max<int64_t>(last_rank(), 1); ++rank) others.push_back(10 * step + rank + 1);
      if (world_size() > 1 && world_rank() == last_rank()) mine.targets.fill_(-100);
      const auto expected = plain_step(pair.plain, *pair.of_plain, token_rows(others), 1e9);
      EXPECT_NEAR(trainer.step({mine}).loss, expected.loss, 1e-9);
    }
    EXPECT_LT(parameter_difference(*pair.net, *pair.plain), 1e-9);
  }
}

/// A program shards what it likes: only modules below the root, or nothing on one rank.
TEST(TrainerStep, TrainsAModelThatOnlyContainsShardedModules) {
  struct HolderImpl : torch::nn::Module {
    explicit HolderImpl(const Net& inner) { register_module("inner", inner); }
  };
  Pair pair;
  HolderImpl holder(pair.net);
  shard_model(pair.net, strategies().front());
  pair.make_optimizers();
  Trainer<Tokens> trainer(holder, *pair.optimizer, {.micro_batches = 2});
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(pair.net, batch); }).data(source());
  auto whole = whole_source();
  for (int64_t step = 0; step < 3; ++step) {
    const auto expected = plain_step(pair.plain, *pair.of_plain, rows_of_step(whole, 2), 1e9);
    EXPECT_NEAR(trainer.step().loss, expected.loss, 1e-9);
  }
  EXPECT_LT(parameter_difference(*pair.net, *pair.plain), 1e-9);
}

TEST(TrainerStep, TrainsAnUnshardedModelOnOneDataRankAlone) {
  auto net = double_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto alone = make_device_mesh(test_device_type(), {1}, {world_rank()});
  Trainer<Tokens> alike(*net, optimizer, {.data_mesh = alone}); // all ranks have the same data
  alike.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
  const auto batch = token_rows({1, 2, 3});
  const auto result = alike.step({batch});
  EXPECT_EQ(result.rows, 3);
  EXPECT_EQ(result.count, batch.counted());
  if (world_size() == 1) return;
  Trainer<Tokens> apart(*net, optimizer);
  apart.loss([&](const Tokens& tokens) { return token_loss_sum(net, tokens); });
  EXPECT_THROWS_WITH(apart.step({batch}), "is neither sharded nor replicated, so that each of the");
  Trainer<Tokens> others(*net, optimizer, {.data_mesh = alone});
  others.loss([&](const Tokens& tokens) { return token_loss_sum(net, tokens); });
  EXPECT_THROWS_WITH(others.step({token_rows({world_rank() + 1})}), "have other data:\n  rank 0: 1 micro-batch, which count");
}

/// Ranks that split layers have the same data: (dp, tp).
TEST(TrainerStep, SumsOverTheDataMeshAlone) {
  if (world_size() != 4) return;
  Pair pair;
  const auto mesh = init_device_mesh(test_device_type(), {2, 2}, {"dp", "tp"});
  ParallelPlan plan{{"blocks.*.up", Colwise{}}, {"blocks.*.down", Rowwise{}}};
  parallelize(*pair.net, mesh["tp"], plan);
  for (auto& block : *pair.net->blocks) fully_shard(*block, mesh["dp"]);
  fully_shard(*pair.net, mesh["dp"]);
  pair.make_optimizers();
  Trainer<Tokens> trainer(*pair.net, *pair.optimizer,
                          {.mesh = mesh, .data_mesh = mesh["dp"], .micro_batches = 2, .max_grad_norm = 0.5});
  const TokenSource mine(kRows, kTogether, mesh.local_rank("dp"), 2);
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(pair.net, batch); }).data(mine);
  auto whole = whole_source();
  for (int64_t step = 0; step < 4; ++step) {
    const auto rows = rows_of_step(whole, 2);
    const auto expected = plain_step(pair.plain, *pair.of_plain, rows, 0.5);
    const auto got = trainer.step();
    EXPECT_NEAR(got.loss, expected.loss, 1e-9);
    EXPECT_NEAR(got.grad_norm, expected.norm, 1e-9);
    EXPECT_EQ(got.rows, rows.rows());
  }
  EXPECT_LT(parameter_difference(*pair.net, *pair.plain), 1e-9);
}

TEST(TrainerStep, StepsTheScheduleAndTheAverages) {
  auto net = double_net(), twin = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.4), of_twin(twin->parameters(), 0.4);
  const WarmupOptions warmup{.warmup_steps = 2, .total_steps = 6, .start_ratio = 0.25};
  WarmupCosineLR schedule(optimizer, warmup), of_plain(of_twin, warmup);
  AveragedModel average(*net, ema(0.5)), plain_average(*twin, ema(0.5));
  Trainer<Tokens> trainer(*net, optimizer);
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); }).data(source());
  trainer.schedule(schedule).average(average);
  auto whole = whole_source();
  for (int64_t step = 0; step < 4; ++step) {
    const double lr = of_twin.param_groups()[0].options().get_lr();
    plain_step(twin, of_twin, rows_of_step(whole, 1), 1e9);
    of_plain.step();
    plain_average.update_parameters(*twin);
    EXPECT_EQ(trainer.step().learning_rate, lr);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), of_twin.param_groups()[0].options().get_lr());
  }
  average.copy_to(*net);
  plain_average.copy_to(*twin);
  EXPECT_LT(parameter_difference(*net, *twin), 1e-9);
}

TEST(TrainerStep, ReportsNumbersBesideTheLoss) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer, {.flops = {.a_row = 10, .peak_of_a_rank = 1000}});
  trainer.loss([&](const Tokens& batch) {
    auto loss = token_loss_sum(net, batch);
    loss.also["ranks"] = {.sum = torch::tensor(static_cast<double>(world_rank() + 1)), .count = 2.0};
    return loss;
  });
  std::vector<StepEvent> events;
  trainer.on_step([&](const StepEvent& event, Control&) { events.push_back(event); });
  const auto result = trainer.step({token_rows({1}), token_rows({2})});
  EXPECT_EQ(result.also.at("ranks"), static_cast<double>(world_size() + 1) / 4);
  EXPECT_GT(result.resident_bytes, 1'000'000);
  EXPECT_GT(result.seconds, 0);
  EXPECT_NEAR(result.rows_per_second, 2.0 * static_cast<double>(world_size()) / result.seconds, 1e-6);
  EXPECT_NEAR(result.flops_utilization, result.rows_per_second * 10 / 1000 / static_cast<double>(world_size()), 1e-6);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].loss, result.loss);
}

/// The draws of a step are those of its number, so that a resume needs no generator's state.
TEST(TrainerStep, SeedsTheRandomNumbersOfEachStep) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer, {.seed = 9});
  std::vector<torch::Tensor> drawn;
  trainer.loss([&](const Tokens& batch) {
    drawn.push_back(torch::rand({3}));
    return token_loss_sum(net, batch);
  });
  for (int64_t step = 0; step < 2; ++step) trainer.step({token_rows({1})});
  for (int64_t step = 0; step < 2; ++step) {
    manual_seed(9, step, world_mesh());
    EXPECT_TENSORS_EQUAL(drawn[static_cast<size_t>(step)], torch::rand({3}));
  }
}

// --- micro-batches that the program runs itself

TEST(TrainerStep, LetsTheProgramRunTheMicroBatches) {
  Pair pair;
  shard_model(pair.net, strategies().front());
  pair.make_optimizers();
  Trainer<Tokens> trainer(*pair.net, *pair.optimizer, {.micro_batches = 2, .max_grad_norm = 0.5});
  trainer.data(source());
  trainer.micro_batches([&](std::span<const Tokens> batches, const MicroBatchesContext& context) {
    double sum = 0;
    for (size_t i = 0; i < batches.size(); ++i) {
      std::optional<NoSync> scope;
      if (i + 1 < batches.size()) scope.emplace(*pair.net);
      const auto loss = token_losses(pair.net, batches[i], at::Reduction::Sum);
      context.scale(loss * (static_cast<double>(context.data_ranks) / context.count)).backward();
      sum += loss.item<double>();
    }
    return LossSum{torch::tensor(sum, torch::kDouble)};
  });
  int64_t clips = 0;
  trainer.clip([&](double max_norm) {
    ++clips;
    return clip_grad_norm_(*pair.net, max_norm);
  });
  auto whole = whole_source();
  for (int64_t step = 0; step < 3; ++step) {
    const auto expected = plain_step(pair.plain, *pair.of_plain, rows_of_step(whole, 2), 0.5);
    EXPECT_NEAR(trainer.step().loss, expected.loss, 1e-9);
  }
  EXPECT_EQ(clips, 3);
  EXPECT_LT(parameter_difference(*pair.net, *pair.plain), 1e-9);
}

// --- what goes wrong

struct Batchless {
  torch::Tensor values;
};

TEST(TrainerStep, IsAnErrorOnEveryRankWhereALossHasNoCount) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Batchless> trainer(*net, optimizer);
  trainer.loss([&](const Batchless& batch) { return LossSum{batch.values.sum()}; });
  EXPECT_THROWS_WITH(trainer.step({{torch::ones({3})}}), "a loss without count");

  const bool is_odd = world_rank() == last_rank();
  const auto named = c10::str("rank ", last_rank(), ": the count of the micro-batches: micro-batch 0 counts ");
  for (const auto& [count, text] : std::vector<std::pair<double, std::string>>{{-1.0, "-1"}, {NAN, "nan"}, {INFINITY, "inf"}}) {
    Trainer<Tokens> other(*net, optimizer);
    other.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
    const double odd = count;
    other.count([&](const Tokens& batch) { return is_odd ? odd : batch.counted(); });
    EXPECT_THROWS_WITH(other.step({token_rows({1})}), named + text);
  }
  Trainer<Tokens> nothing(*net, optimizer);
  nothing.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
  nothing.count([](const Tokens&) { return 0.0; });
  EXPECT_THROWS_WITH(nothing.step({token_rows({1})}), "none of the 1 micro-batches of any of the");
  Trainer<Tokens> throwing(*net, optimizer);
  throwing.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
  throwing.count([&](const Tokens& batch) {
    TORCH_CHECK(!is_odd, "no count today");
    return batch.counted();
  });
  EXPECT_THROWS_WITH(throwing.step({token_rows({1})}),
                     c10::str("rank ", last_rank(), ": the count of the micro-batches: no count today"));
}

TEST(TrainerStep, IsAnErrorWhereTheLossCountsOtherwiseThanWasSaid) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer);
  trainer.loss([&](const Tokens& batch) {
    auto loss = token_loss_sum(net, batch);
    if (world_rank() == last_rank()) loss.count = 1000;
    return loss;
  });
  EXPECT_THROWS_WITH(trainer.step({token_rows({1})}), c10::str("rank ", last_rank(), ": the loss of micro-batch 0 counts 1000"));
  Trainer<Tokens> shaped(*net, optimizer);
  shaped.loss([&](const Tokens& batch) { return LossSum{token_losses(net, batch, at::Reduction::None)}; });
  EXPECT_THROWS_WITH(shaped.step({token_rows({1})}), "the loss of micro-batch 0 has the shape [8], but must be a number");
  Trainer<Tokens> constant(*net, optimizer);
  constant.loss([&](const Tokens&) { return LossSum{torch::tensor(1.0)}; });
  EXPECT_THROWS_WITH(constant.step({token_rows({1})}), "does not depend on a parameter that trains");
  Trainer<Tokens> undefined(*net, optimizer);
  undefined.loss([&](const Tokens&) { return LossSum{}; });
  EXPECT_THROWS_WITH(undefined.step({token_rows({1})}), "the loss of micro-batch 0 is an undefined tensor");
  Trainer<Tokens> mean(*net, optimizer);
  mean.loss([&](const Tokens& batch) { return LossMean{token_losses(net, batch, at::Reduction::Sum) * 0.0}; });
  auto none = token_rows({1});
  if (world_rank() == last_rank() && world_size() > 1) none.targets.fill_(-100);
  if (world_size() > 1) EXPECT_THROWS_WITH(mean.step({none}), "is a mean, but counts nothing: return its sum, a LossSum");
}

TEST(TrainerStep, IsAnErrorOnEveryRankWhereTheDataEndOnOne) {
  for (const int64_t micro_batches : {1, 2}) {
    auto net = double_net();
    shard_model(net, strategies().front());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer<Tokens> trainer(*net, optimizer, {.micro_batches = micro_batches});
    trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
    const bool is_odd = world_rank() == last_rank() && world_size() > 1;
    trainer.data(TokenSource(is_odd ? 24 : 36, 12, 0, 1));
    if (world_size() == 1) continue;
    EXPECT_THROWS_WITH((trainer.step(), trainer.step()), "a data source has ended on some ranks alone:\n  rank 0: ");
  }
}

struct ThrowingSource {
  std::optional<Tokens> next() {
    TORCH_CHECK(position_.row < 2 || world_rank() != last_rank(), "the disk is gone");
    ++position_.row;
    return token_rows({position_.row});
  }
  DataPosition position() const { return position_; }
  void seek(const DataPosition& position) { position_ = position; }
  DataPosition position_;
};

struct EmptySource {
  std::optional<Tokens> next() { return std::nullopt; }
  DataPosition position() const { return {}; }
  void seek(const DataPosition&) {}
};

TEST(TrainerStep, IsAnErrorOnEveryRankWhereADataSourceThrowsOnOne) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer);
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
  EXPECT_THROWS_WITH(trainer.step(), "the data source: there is none: call data()");
  trainer.data(ThrowingSource{});
  trainer.step(); // which reads one ahead
  EXPECT_THROWS_WITH(trainer.step(), c10::str("rank ", last_rank(), ": the data source: the disk is gone"));
  EXPECT_THROWS_WITH(trainer.step({token_rows({1})}), "step(micro_batches) is for a trainer without data()");
  Trainer<Tokens> empty(*net, optimizer);
  empty.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); }).data(EmptySource{});
  EXPECT_THROWS_WITH(empty.step(), "it has no micro-batch in a whole epoch");
  Trainer<Tokens> without(*net, optimizer);
  EXPECT_THROWS_WITH(without.step({token_rows({1})}), "there is no loss: call loss()");
}

TEST(TrainerStep, TellsInTheNextCallWhatAnEventsFunctionThrew) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer);
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); });
  trainer.on_step([](const StepEvent& event, Control&) {
    TORCH_CHECK(world_rank() != last_rank() || event.step < 2, "I do not like step ", event.step);
  });
  trainer.step({token_rows({1})});
  trainer.step({token_rows({1})});
  EXPECT_THROWS_WITH(trainer.step({token_rows({1})}),
                     c10::str("rank ", last_rank(), ": a function of on_step: I do not like step 2"));
}

TEST(TrainerStep, RefusesOptionsThatMeanNothing) {
  auto net = double_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto make = [&](const TrainerOptions& options) { Trainer<Tokens> trainer(*net, optimizer, options); };
  EXPECT_THROWS_WITH(make({.micro_batches = 0}), "TrainerOptions::micro_batches is 0, but must be at least 1");
  EXPECT_THROWS_WITH(make({.max_grad_norm = -1}), "TrainerOptions::max_grad_norm is -1");
  EXPECT_THROWS_WITH(make({.max_grad_norm = NAN}), "TrainerOptions::max_grad_norm is nan");
  EXPECT_THROWS_WITH(make({.save = {.folder = "x", .keep = 1}}), "TrainerOptions::save.keep is 1, but must be at least 2");
  EXPECT_THROWS_WITH(make({.save = {.every = {.steps = 5}}}), "TrainerOptions::save.folder is empty");
  EXPECT_THROWS_WITH(make({.evaluate = {.steps = -5}}), "TrainerOptions::evaluate is -5 steps");
  EXPECT_THROWS_WITH(make({.early_stop = EarlyStop{.metric = "valid", .patience = 0}}), "early_stop.patience is 0");
  EXPECT_THROWS_WITH(make({.profile = {.folder = "x", .steps = 0}}), "TrainerOptions::profile has 0 steps");
  if (world_size() == 1) return;
  const auto first = make_device_mesh(test_device_type(), {1}, {0});
  if (world_rank() > 0) EXPECT_THROWS_WITH(make({.mesh = first}), "is not in the mesh");
}

// --- numbers that are not finite

TEST(TrainerStep, LeavesOutAStepThatOverflowedInHalfPrecision) {
  auto net = make_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  WarmupLinearLR schedule(optimizer, {.warmup_steps = 4, .total_steps = 8, .start_ratio = 0.1});
  AveragedModel average(*net);
  Trainer<Tokens> trainer(*net, optimizer, {.scaler = {.init_scale = 1024, .growth_interval = 2}});
  trainer.schedule(schedule).average(average);
  bool overflows = false;
  trainer.loss([&](const Tokens& batch) {
    auto loss = token_loss_sum(net, batch);
    if (overflows && world_rank() == last_rank()) loss.sum = loss.sum * std::exp2(115.0); // times the scale it is infinite
    return loss;
  });
  EXPECT_EQ(trainer.step({token_rows({1})}).outcome, StepOutcome::kStepped);
  overflows = true;
  const auto before = full(net->named_parameters()["norm.weight"]).clone();
  const auto skipped = trainer.step({token_rows({1})});
  EXPECT_EQ(skipped.outcome, StepOutcome::kSkipped);
  EXPECT_EQ(skipped.loss_scale, 1024);
  EXPECT_FALSE(std::isfinite(skipped.grad_norm));
  EXPECT_TRUE(std::isfinite(skipped.loss));
  EXPECT_EQ(skipped.step, 2);
  EXPECT_TENSORS_EQUAL(full(net->named_parameters()["norm.weight"]), before);
  EXPECT_EQ(schedule.steps_taken(), 1);
  EXPECT_EQ(average.n_averaged(), 1);
  overflows = false;
  const auto next = trainer.step({token_rows({1})});
  EXPECT_EQ(next.loss_scale, 512);
  EXPECT_EQ(next.outcome, StepOutcome::kStepped);
  EXPECT_EQ(schedule.steps_taken(), 2);
}

/// Makes NaN in a module of the last rank, where `bad` says so.
struct Poison {
  Net net = double_net();
  bool bad = false;
  Poison() { shard_model(net, strategies().front()); }
  LossSum loss(const Tokens& batch) {
    const auto rows = batch.tokens.slice(1, 0, -1);
    auto x = net->embedded(rows);
    if (bad && world_rank() == last_rank()) x = x * NAN;
    for (auto& block : *net->blocks) x = block->as<Block>()->forward(x);
    const auto scores = torch::matmul(net->norm(x), net->embed->weight.t()).reshape({-1, 61});
    return {.sum = at::cross_entropy_loss(scores, batch.targets.reshape({-1}).to(scores.device()), {}, at::Reduction::Sum),
            .count = batch.counted()};
  }
};

TEST(TrainerStep, NamesTheModuleAndTheRankOfNaN) {
  Poison poison;
  torch::optim::SGD optimizer(poison.net->parameters(), 0.1);
  Trainer<Tokens> trainer(*poison.net, optimizer);
  trainer.loss([&](const Tokens& batch) { return poison.loss(batch); });
  trainer.step({token_rows({1})});
  const auto before = full(poison.net->named_parameters()["norm.weight"]).clone();
  poison.bad = true;
  const auto message = error_of([&] { trainer.step({token_rows({2})}); });
  EXPECT_NE(message.find("in step 2 the loss is nan"), std::string::npos) << message;
  EXPECT_NE(message.find(c10::str("first on rank ", last_rank())), std::string::npos) << message;
  EXPECT_NE(message.find("embed"), std::string::npos) << message;
  EXPECT_TENSORS_EQUAL(full(poison.net->named_parameters()["norm.weight"]), before);
}

TEST(TrainerStep, SkipsAtMostTwoStepsInARow) {
  Poison poison;
  torch::optim::SGD optimizer(poison.net->parameters(), 0.1);
  Trainer<Tokens> trainer(*poison.net, optimizer, {.non_finite = NonFinite::kSkip});
  trainer.loss([&](const Tokens& batch) { return poison.loss(batch); });
  poison.bad = true;
  for (int i = 0; i < 2; ++i) {
    const auto result = trainer.step({token_rows({1})});
    EXPECT_EQ(result.outcome, StepOutcome::kSkipped);
    EXPECT_TRUE(std::isnan(result.loss));
  }
  poison.bad = false;
  EXPECT_EQ(trainer.step({token_rows({1})}).outcome, StepOutcome::kStepped);
  poison.bad = true;
  for (int i = 0; i < 2; ++i) trainer.step({token_rows({1})});
  EXPECT_THROWS_WITH(trainer.step({token_rows({1})}), "the 3rd step in a row that is not finite; computed again");
}

/// The gradient of sqrt at 0 is infinite, and the loss is not.
TEST(TrainerStep, SeesGradientsThatAreNotFinite) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer);
  trainer.loss([&](const Tokens& batch) {
    auto loss = token_loss_sum(net, batch);
    if (world_rank() == last_rank()) loss.sum = loss.sum + torch::sqrt(loss.sum * 0.0);
    return loss;
  });
  EXPECT_THROWS_WITH(trainer.step({token_rows({1})}), "the norm of the gradients");
}

} // namespace
} // namespace tessera::testing::trainer_step_test
