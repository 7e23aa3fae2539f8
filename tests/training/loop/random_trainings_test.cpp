// Trainings that are drawn: cut into runs, each of which goes on from the last one's checkpoint with another strategy and other
// micro-batches, beside a hand-written loop in one process.
#include <tessera/tessera.h>

#include <map>
#include <memory>
#include <optional>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/training/loop/token_training.h>

namespace tessera::testing::random_trainings_test {
namespace {

constexpr int64_t kRows = 65, kRowsAStep = 24; // three steps an epoch, the last of which has 17 rows

using Parameters = std::vector<torch::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;

template <typename Optimizer, typename Options>
MakeOptimizer maker(Options options) {
  return [options](const Parameters& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

/// What all runs of a training share.
struct Script {
  std::string optimizer;
  MakeOptimizer make, make_plain;
  double max_norm = 0;
  bool has_schedule = false, has_average = false, scales = false;
  int64_t evaluate_every = 0;
  std::vector<int64_t> ends; ///< of the runs, in steps
};

Script draw_script(Draw& draw) {
  using torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::SGD, torch::optim::SGDOptions;
  const auto sgd = SGDOptions(0.2).momentum(0.9).weight_decay(0.01);
  const AdamWOptions adamw(1e-2);
  Script script;
  switch (draw.below(4)) {
    case 0: script = {.optimizer = "SGD", .make = maker<SGD>(sgd), .make_plain = maker<SGD>(sgd)}; break;
    case 1: script = {.optimizer = "AdamW", .make = maker<AdamW>(adamw), .make_plain = maker<AdamW>(adamw)}; break;
    case 2: script = {.optimizer = "FusedSGD", .make = maker<FusedSGD>(sgd), .make_plain = maker<SGD>(sgd)}; break;
    default: script = {.optimizer = "FusedAdamW", .make = maker<FusedAdamW>(adamw), .make_plain = maker<AdamW>(adamw)};
  }
  script.max_norm = draw.of<double>({0, 0.3, 3});
  script.has_schedule = draw.chance(50);
  script.has_average = draw.chance(50);
  script.scales = draw.chance(30);
  script.evaluate_every = draw.of<int64_t>({0, 1, 3});
  int64_t steps = 0;
  for (int64_t runs = 1 + draw.below(3); runs > 0; --runs) script.ends.push_back(steps += 1 + draw.below(4));
  return script;
}

WarmupOptions schedule_options() { return {.warmup_steps = 3, .total_steps = 15, .start_ratio = 0.1}; }

/// What a rank computes in a step, and holds behind it.
struct Seen {
  double loss = 0, norm = 0, rate = 0;
  std::map<std::string, double> evaluations; ///< by name
};
using Curve = std::map<int64_t, Seen>;

/// One process that has never heard of a trainer.
struct Plain {
  Net net = double_net();
  std::optional<AveragedModel> average;
  Curve curve;

  explicit Plain(const Script& script) {
    const auto optimizer = script.make_plain(net->parameters());
    std::optional<WarmupCosineLR> schedule;
    if (script.has_schedule) schedule.emplace(*optimizer, schedule_options());
    average.emplace(*net, ema(0.8));
    TokenSource rows(kRows, kRowsAStep, 0, 1);
    for (int64_t step = 1; step <= script.ends.back(); ++step) {
      auto& seen = curve[step];
      seen.rate = optimizer->param_groups().front().options().get_lr();
      const double limit = script.max_norm > 0 ? script.max_norm : std::numeric_limits<double>::infinity();
      const auto result = plain_step(net, *optimizer, rows_of_step(rows, 1), limit);
      seen.loss = result.loss;
      seen.norm = result.norm;
      if (schedule) schedule->step();
      average->update_parameters(*net);
      evaluate(script, step, seen);
    }
  }
  void evaluate(const Script& script, int64_t step, Seen& seen) {
    if (script.evaluate_every == 0 || step % script.evaluate_every != 0) return;
    seen.evaluations["valid"] = plain_validation(net);
    if (!script.has_average) return;
    const AveragedWeights averaged(*average, *net);
    seen.evaluations["averaged"] = plain_validation(net);
  }
};

/// Moves a part of the strategies' state out of the device's memory.
Strategy draw_strategy(Draw& draw, const SharedFolder& folder) {
  auto strategy = draw.of(strategies());
  const auto place = draw.below(4);
  if (place == 1) strategy.options.offload = offload_to_host();
  if (place == 2 && !strategy.replicates) strategy.options.offload = offload_to_files(folder.path().string());
  return strategy;
}

struct Run {
  Net net = double_net();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<WarmupCosineLR> schedule;
  std::optional<AveragedModel> average;
};

TrainerOptions options_of(const Script& script, int64_t end, const SharedFolder& folder, Draw& draw) {
  TrainerOptions options{.max_grad_norm = script.max_norm, .stop_after = {.steps = end}};
  options.save.folder = (folder.path() / "saved").string();
  options.save.every.steps = draw.below(3);
  options.save.keep = draw.of<int64_t>({0, 2});
  options.evaluate.steps = script.evaluate_every;
  options.log.progress = false;
  options.log.breakdown = draw.chance(30);
  if (script.scales) options.scaler = {.init_scale = 1024, .growth_interval = 1000, .enabled = true};
  return options;
}

DataSource<Tokens> draw_source(Draw& draw, int64_t micro_batches) {
  const TokenSource source(kRows, kRowsAStep / micro_batches, world_rank(), world_size());
  if (draw.chance(50)) return source;
  return prefetch(source, {.depth = 1 + draw.below(3)});
}

/// Trains to `end`, and adds what it saw to `curve`.
void train(const Script& script, int64_t end, const SharedFolder& folder, Draw& draw, Run& run, Curve& curve) {
  const auto strategy = draw_strategy(draw, folder);
  auto options = options_of(script, end, folder, draw);
  options.micro_batches = draw.of<int64_t>({1, 2, 3, 4});
  SCOPED_TRACE(c10::str("to step ", end, ", ", strategy.name, ", ", options.micro_batches, " micro-batches"));
  shard_model(run.net, strategy);
  run.optimizer = script.make(run.net->parameters());
  Trainer<Tokens> trainer(*run.net, *run.optimizer, options);
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(run.net, batch); });
  trainer.data(draw_source(draw, options.micro_batches));
  if (script.has_schedule) trainer.schedule(run.schedule.emplace(*run.optimizer, schedule_options()));
  if (script.has_average) trainer.average(run.average.emplace(*run.net, ema(0.8)));
  trainer.evaluate("valid", TokenSource(17, 8, world_rank(), world_size()));
  if (script.has_average) {
    trainer.evaluate(
        "averaged", TokenSource(17, 8, world_rank(), world_size()),
        [&](const Tokens& batch) { return token_loss_sum(run.net, batch); }, &*run.average);
  }
  const auto asks = draw.below(5);
  trainer.on_step([&](const StepEvent& event, Control& control) {
    curve[event.step] = {event.loss, event.grad_norm, event.learning_rate, {}};
    if (event.step % 5 == asks && world_rank() == world_size() - 1) control.save();
  });
  trainer.on_evaluate([&](const EvaluationEvent& event, Control&) { curve.at(event.step).evaluations[event.name] = event.loss; });
  EXPECT_EQ(trainer.run().steps, end);
}

void compare(const Script& script, const Curve& got, const Plain& plain) {
  for (const auto& [step, expected] : plain.curve) {
    SCOPED_TRACE(c10::str("step ", step));
    ASSERT_EQ(got.count(step), 1U);
    const auto& seen = got.at(step);
    EXPECT_NEAR(seen.loss, expected.loss, 1e-8);
    EXPECT_NEAR(seen.norm, expected.norm, 1e-8);
    EXPECT_NEAR(seen.rate, expected.rate, 1e-12);
    for (const auto& [name, loss] : expected.evaluations) {
      ASSERT_EQ(seen.evaluations.count(name), 1U) << name;
      EXPECT_NEAR(seen.evaluations.at(name), loss, 1e-8) << name;
    }
  }
  EXPECT_EQ(static_cast<int64_t>(got.size()), script.ends.back());
}

void train_as_drawn(uint64_t seed) {
  Draw draw(seed);
  const auto script = draw_script(draw);
  SCOPED_TRACE(c10::str("script ", seed, ", ", script.optimizer, ", clipped to ", script.max_norm));
  Plain plain(script);
  const SharedFolder folder;
  Curve curve;
  std::optional<Run> run;
  for (const auto end : script.ends) {
    run.reset();
    train(script, end, folder, draw, run.emplace(), curve);
  }
  compare(script, curve, plain);
  EXPECT_LT(parameter_difference(*run->net, *plain.net), 1e-7);
}

/// TESSERA_TRAINING=17: that one.
TEST(RandomTrainings, AreThoseOfOneProcess) {
  if (const char* const one = std::getenv("TESSERA_TRAINING")) return train_as_drawn(std::stoull(one));
  std::vector<uint64_t> seeds(200);
  for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = i;
  for (const auto seed : sweep(seeds, 6)) train_as_drawn(seed);
}

} // namespace
} // namespace tessera::testing::random_trainings_test
