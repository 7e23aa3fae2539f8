// Calls of a trainer in other orders than a program should make them, and models that do not fit it.
#include <tessera/tessera.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/training/loop/token_training.h>

namespace tessera::testing::trainer_calls_test {
namespace {

constexpr int64_t kRows = 41, kTogether = 12;

TokenSource source() { return {kRows, kTogether, world_rank(), world_size()}; }
TokenSource valid_source() { return {17, 8, world_rank(), world_size()}; }

struct Training {
  Net net = double_net();
  std::optional<torch::optim::SGD> optimizer;
  std::optional<Trainer<Tokens>> trainer;
  std::vector<int64_t> steps;

  explicit Training(TrainerOptions options = {}) {
    options.log.progress = false;
    shard_model(net, strategies().front());
    optimizer.emplace(net->parameters(), torch::optim::SGDOptions(0.1));
    trainer.emplace(*net, *optimizer, options);
    trainer->loss([this](const Tokens& batch) { return token_loss_sum(net, batch); }).data(source());
    trainer->on_step([this](const StepEvent& event, Control&) { steps.push_back(event.step); });
  }
};

// --- gradients that would count where they should not

TEST(TrainerCalls, RefuseAParameterThatTrainsAndTheOptimizerDoesNotHave) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer({net->norm->weight, net->norm->bias}, 0.1);
  Trainer<Tokens> trainer(*net, optimizer, {.max_grad_norm = 0.5});
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); }).data(source());
  EXPECT_THROWS_WITH(trainer.step(), "embed.weight");
}

TEST(TrainerCalls, TrainAPartWhereTheRestIsFrozen) {
  auto net = double_net(), plain = double_net();
  const auto freeze = [](Net& each) {
    each->embed->weight.requires_grad_(false);
    for (auto& parameter : each->blocks->parameters()) parameter.requires_grad_(false);
  };
  freeze(net);
  freeze(plain);
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer({net->norm->weight, net->norm->bias}, 0.1);
  torch::optim::SGD of_plain({plain->norm->weight, plain->norm->bias}, 0.1);
  Trainer<Tokens> trainer(*net, optimizer, {.micro_batches = 2, .max_grad_norm = 0.01});
  trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); }).data(source());
  TokenSource whole(kRows, kTogether, 0, 1);
  for (int64_t step = 0; step < 3; ++step) {
    const auto expected = plain_step(plain, of_plain, rows_of_step(whole, 2), 0.01);
    const auto got = trainer.step();
    EXPECT_NEAR(got.loss, expected.loss, 1e-9);
    EXPECT_NEAR(got.grad_norm, expected.norm, 1e-9);
  }
  EXPECT_LT(parameter_difference(*net, *plain), 1e-9);
}

/// What an interrupted accumulation has left would be added to the next step's gradients.
TEST(TrainerCalls, AreErrorsAfterAnError) {
  auto net = double_net();
  shard_model(net, strategies().front());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  Trainer<Tokens> trainer(*net, optimizer, {.micro_batches = 3, .stop_after = {.steps = 3}, .log = {.progress = false}});
  int64_t calls = 0;
  trainer.loss([&](const Tokens& batch) {
    TORCH_CHECK(++calls != 2, "the second forward fails");
    return token_loss_sum(net, batch);
  });
  trainer.data(source());
  EXPECT_THROWS_WITH(trainer.step(), "the second forward fails");
  EXPECT_THROWS_WITH(trainer.step(), "an earlier call");
  EXPECT_THROWS_WITH(trainer.run(), "an earlier call");
  EXPECT_THROWS_WITH(trainer.evaluate_now(), "an earlier call");
}

TEST(TrainerCalls, AreNoErrorsAfterAWrongOne) {
  Training training({.micro_batches = 2});
  EXPECT_THROWS_WITH(training.trainer->save(), "save.folder");
  EXPECT_THROWS_WITH(training.trainer->step({token_rows({1})}), "without data()");
  Training other({.micro_batches = 2});
  for (int64_t step = 0; step < 2; ++step) EXPECT_EQ(training.trainer->step().loss, other.trainer->step().loss);
}

/// Each group's gradients must be the mean over the ranks whose losses are added.
TEST(TrainerCalls, RefuseGradientsThatAreDividedByAnotherNumber) {
  if (world_size() == 1) return;
  const auto step = [](const DeviceMesh& data_mesh, double factor) {
    auto net = double_net();
    shard_model(net, strategies().front());
    if (factor > 0) fsdp(*(*net->blocks)[0]).set_gradient_divide_factor(factor);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer<Tokens> trainer(*net, optimizer, {.mesh = world_mesh(), .data_mesh = data_mesh});
    trainer.loss([&](const Tokens& batch) { return token_loss_sum(net, batch); }).data(TokenSource(kRows, kTogether, 0, 1));
    trainer.step();
  };
  const auto alone = init_device_mesh(mesh_device_type, {1, world_size()}, {"data", "sequence"})["data"];
  EXPECT_THROWS_WITH(step(alone, 0), "TrainerOptions::data_mesh");
  EXPECT_THROWS_WITH(step(world_mesh(), 1), "blocks.0");
  EXPECT_NO_THROW(step(world_mesh(), static_cast<double>(world_size())));
}

TEST(TrainerCalls, RefuseRowsThatAreNoNumber) {
  for (const double rows : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Training training;
    training.trainer->rows([&](const Tokens&) { return rows; });
    EXPECT_THROWS_WITH(training.trainer->step(), "rows");
  }
}

// --- resume

/// Each start of a program that has come to its end evaluates nothing anew.
TEST(TrainerCalls, RunAFinishedTrainingAgainWithoutCountingItsEvaluationAgain) {
  const SharedFolder root;
  const auto run = [&](int64_t steps) {
    Training training({.stop_after = {.steps = steps},
                       .save = {.folder = root.path()},
                       .evaluate = {.steps = 2},
                       .early_stop = EarlyStop{.metric = "valid", .patience = 2}});
    training.trainer->evaluate("valid", valid_source());
    int64_t evaluations = 0;
    training.trainer->on_evaluate([&](const EvaluationEvent&, Control&) { ++evaluations; });
    const auto end = training.trainer->run();
    return std::make_tuple(end.reason, end.steps, evaluations);
  };
  EXPECT_EQ(run(4), std::make_tuple(StopReason::kSteps, 4, 2));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(run(4), std::make_tuple(StopReason::kSteps, 4, 0));
  EXPECT_EQ(run(8), std::make_tuple(StopReason::kSteps, 8, 2));
}

TEST(TrainerCalls, RunGoesOnFromStepsOfTheSameTrainer) {
  const SharedFolder root;
  Training training({.stop_after = {.steps = 6}, .save = {.folder = root.path()}});
  for (int i = 0; i < 2; ++i) training.trainer->step();
  training.trainer->save();
  for (int i = 0; i < 2; ++i) training.trainer->step();
  training.trainer->run();
  EXPECT_EQ(training.steps, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
}

/// A type that tells its terms and not its rows: how many terms a step has says nothing of how many rows.
TEST(TrainerCalls, ResumeWhereOnlyTermsAreCounted) {
  struct Batch {
    Tokens tokens;
    double counted() const { return tokens.counted(); }
  };
  struct Source {
    TokenSource source;
    std::optional<Batch> next() {
      auto batch = source.next();
      return batch ? std::optional(Batch{*batch}) : std::nullopt;
    }
    DataPosition position() const { return source.position(); }
    void seek(const DataPosition& position) { source.seek(position); }
  };
  const SharedFolder root;
  for (const int64_t steps : {2, 4, 5}) {
    auto net = double_net();
    shard_model(net, strategies().front());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    Trainer<Batch> trainer(*net, optimizer,
                           {.stop_after = {.steps = steps}, .save = {.folder = root.path()}, .log = {.progress = false}});
    trainer.loss([&](const Batch& batch) { return token_loss_sum(net, batch.tokens); });
    trainer.data(Source{TokenSource(400, kTogether, world_rank(), world_size())});
    EXPECT_EQ(trainer.run().steps, steps);
  }
}

TEST(TrainerCalls, ResumePastFoldersThatAreNoCheckpoints) {
  const SharedFolder root;
  const TrainerOptions options{.stop_after = {.steps = 3}, .save = {.folder = root.path(), .every = {.steps = 1}, .keep = 2}};
  {
    Training training(options);
    training.trainer->run();
  }
  SharedFolder::barrier();
  if (world_rank() == 0) {
    const std::filesystem::path& folder(root.path());
    std::filesystem::create_directories(folder / "step-000009"); // empty
    std::filesystem::create_directories(folder / "step-junk");
    std::ofstream(folder / "step-000010") << "a file";
    std::filesystem::remove(folder / "latest");
    std::filesystem::create_symlink("step-000099", folder / "latest"); // which is not there
  }
  SharedFolder::barrier();
  auto longer = options;
  longer.stop_after.steps = 5;
  Training training(longer);
  const auto end = training.trainer->run();
  EXPECT_EQ(end.steps, 5);
  EXPECT_EQ(training.steps, (std::vector<int64_t>{4, 5}));
}

} // namespace
} // namespace tessera::testing::trainer_calls_test
