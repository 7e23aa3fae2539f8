// The run of a trainer: its end, checkpoints, resume, evaluations and events.
#include <tessera/tessera.h>

#include <cmath>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/training/loop/token_training.h>

namespace tessera::testing::trainer_run_test {
namespace {

constexpr int64_t kRows = 41, kTogether = 12; // four micro-batches an epoch, the last with 5 rows

TokenSource source() { return {kRows, kTogether, world_rank(), world_size()}; }
TokenSource valid_source() { return {17, 8, world_rank(), world_size()}; }

/// Ranks that are threads share the generator.
Net make_net_alone() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  return double_net();
}

/// A training with all that a checkpoint holds.
struct Training {
  Net net = make_net_alone();
  std::optional<torch::optim::AdamW> optimizer;
  std::optional<WarmupCosineLR> schedule;
  std::optional<AveragedModel> average;
  std::optional<Trainer<Tokens>> trainer;
  int64_t kept = 0;
  std::vector<StepEvent> steps;
  std::vector<EvaluationEvent> evaluations;
  std::vector<SaveEvent> saves;
  std::vector<ResumeEvent> resumes;
  std::vector<StopEvent> stops;

  explicit Training(const TrainerOptions& given, const Strategy& strategy = strategies().front()) {
    auto options = given;
    options.log.progress = false;
    options.max_grad_norm = 0.5;
    shard_model(net, strategy);
    optimizer.emplace(net->parameters(), 1e-2);
    schedule.emplace(*optimizer, WarmupOptions{.warmup_steps = 2, .total_steps = 20, .start_ratio = 0.1});
    average.emplace(*net, ema(0.9));
    trainer.emplace(*net, *optimizer, options);
    trainer->loss([this](const Tokens& batch) { return token_loss_sum(net, batch); }).data(source());
    trainer->schedule(*schedule).average(*average);
    trainer->keep(
        "kept",
        [this] {
          StateDict state;
          state.set("kept.number", kept);
          return state;
        },
        [this](const StateDict& state) { kept = state.value<int64_t>("kept.number"); });
    trainer->on_step([this](const StepEvent& event, Control&) {
      steps.push_back(event);
      kept += 10;
    });
    trainer->on_evaluate([this](const EvaluationEvent& event, Control&) { evaluations.push_back(event); });
    trainer->on_save([this](const SaveEvent& event, Control&) { saves.push_back(event); });
    trainer->on_resume([this](const ResumeEvent& event, Control&) { resumes.push_back(event); });
    trainer->on_stop([this](const StopEvent& event) { stops.push_back(event); });
  }
  TrainingEnd run() { return trainer->run(); }
  std::vector<double> losses() const {
    std::vector<double> losses;
    for (const auto& step : steps) losses.push_back(step.loss);
    return losses;
  }
};

std::set<std::string> folders_in(const std::filesystem::path& root) {
  SharedFolder::barrier();
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(root)) names.insert(entry.path().filename().string());
  SharedFolder::barrier();
  return names;
}

bool same_weights(Training& a, Training& b) {
  bool same = true;
  const auto of_b = b.net->named_parameters();
  for (const auto& item : a.net->named_parameters()) same = same && torch::equal(full(item.value()), full(of_b[item.key()]));
  return same;
}

// --- the end

TEST(TrainerRun, EndsAfterStepsOrEpochs) {
  Training by_steps({.stop_after = {.steps = 3, .epochs = 2}});
  const auto end = by_steps.run();
  EXPECT_EQ(end.reason, StopReason::kSteps);
  EXPECT_EQ(end.steps, 3);
  EXPECT_EQ(end.text, "3 steps are done");
  ASSERT_EQ(by_steps.stops.size(), 1U);
  EXPECT_EQ(by_steps.stops[0].steps, 3);
  Training by_epochs({.micro_batches = 3, .stop_after = {.steps = 100, .epochs = 2}});
  EXPECT_EQ(by_epochs.run().reason, StopReason::kEpochs);
  EXPECT_EQ(by_epochs.steps.size(), 4U);
  EXPECT_EQ(by_epochs.steps.back().epochs, 2);
  EXPECT_EQ(by_epochs.run().steps, 4); // it has ended already
}

/// The ranks' clocks differ: the last rank's alone says that the time is over.
TEST(TrainerRun, EndsTogetherWhenTheTimeIsOverOnOneRank) {
  Training training(
      {.stop_after = {.steps = 100000, .run_time = std::chrono::milliseconds(world_rank() == last_rank() ? 1 : 1'000'000)}});
  const auto end = training.run();
  EXPECT_EQ(end.reason, StopReason::kRunTime);
  EXPECT_LT(end.steps, 100000);
  EXPECT_EQ(all_reduce({{"steps", static_cast<double>(end.steps)}}, world_mesh(), ReduceOp::kMax).at("steps"),
            static_cast<double>(end.steps));
}

TEST(TrainerRun, EndsWhereAFunctionOfOneRankAsksForIt) {
  SharedFolder root;
  Training training({.stop_after = {.steps = 10}, .save = {.folder = root.path()}});
  training.trainer->on_step([](const StepEvent& event, Control& control) {
    if (event.step == 2 && world_rank() == last_rank()) control.stop("enough");
  });
  const auto end = training.run();
  EXPECT_EQ(end.reason, StopReason::kAsked);
  EXPECT_EQ(end.text, "enough");
  EXPECT_EQ(end.steps, 2);
  EXPECT_EQ(folders_in(root.path()), (std::set<std::string>{"step-000002", "latest"}));
}

TEST(TrainerRun, ThrowsOnEveryRankWhatAFunctionOfOneRankThrew) {
  for (const int64_t at : {1, 4}) { // in the middle, and after the last step
    Training training({.stop_after = {.steps = 4}});
    training.trainer->on_step([at](const StepEvent& event, Control&) {
      TORCH_CHECK(event.step != at || world_rank() != last_rank(), "not this step");
    });
    EXPECT_THROWS_WITH(training.run(), c10::str("rank ", last_rank(), ": a function of on_step: not this step"));
  }
  Training on_stop({.stop_after = {.steps = 1}});
  on_stop.trainer->on_stop([](const StopEvent&) { TORCH_CHECK(world_rank() != last_rank(), "not the end"); });
  EXPECT_THROWS_WITH(on_stop.run(), c10::str("rank ", last_rank(), ": a function of on_stop: not the end"));
}

// --- checkpoints

TEST(TrainerRun, SavesEveryNStepsAndAtTheEndAndKeepsTheNewest) {
  SharedFolder root;
  Training training({.stop_after = {.steps = 7}, .save = {.folder = root.path(), .every = {.steps = 2}, .keep = 2}});
  training.run();
  EXPECT_EQ(folders_in(root.path()), (std::set<std::string>{"step-000006", "step-000007", "latest"}));
  std::vector<int64_t> at;
  for (const auto& save : training.saves) at.push_back(save.step);
  EXPECT_EQ(at, (std::vector<int64_t>{2, 4, 6, 7}));
  EXPECT_EQ(training.saves.back().folder, root.path() / "step-000007");
}

TEST(TrainerRun, SavesWhereAFunctionAsksForItOrTheTimeIsOver) {
  SharedFolder root;
  Training asked({.stop_after = {.steps = 5}, .save = {.folder = root.path()}});
  asked.trainer->on_step([](const StepEvent& event, Control& control) {
    if (event.step == 3 && world_rank() == last_rank()) control.save();
  });
  asked.run();
  EXPECT_EQ(folders_in(root.path()), (std::set<std::string>{"step-000003", "step-000005", "latest"}));
  SharedFolder other;
  Training timed({.stop_after = {.steps = 3}, .save = {.folder = other.path(), .every = {.time = std::chrono::milliseconds(1)}}});
  timed.trainer->on_step([](const StepEvent&, Control&) { // a step longer than that
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(2)) {
    }
  });
  timed.run();
  EXPECT_TRUE(folders_in(other.path()).count("step-000002") == 1);
}

/// Bit for bit, after every step, in the middle of an epoch too.
TEST(TrainerRun, ResumesToTheBitAfterEveryStep) {
  const TrainerOptions options{.micro_batches = 3, .stop_after = {.steps = 5}};
  Training whole(options);
  whole.run();
  for (int64_t cut = 1; cut < 5; ++cut) {
    SCOPED_TRACE(cut);
    SharedFolder root;
    auto first_options = options, second_options = options;
    first_options.stop_after.steps = cut;
    first_options.save.folder = second_options.save.folder = root.path();
    Training first(first_options);
    first.run();
    Training second(second_options);
    second.run();
    ASSERT_EQ(second.resumes.size(), 1U);
    EXPECT_EQ(second.resumes[0].step, cut);
    EXPECT_TRUE(second.resumes[0].differences.empty());
    ASSERT_EQ(first.steps.size() + second.steps.size(), 5U);
    for (size_t i = 0; i < 5; ++i) {
      const auto& got = i < first.steps.size() ? first.steps[i] : second.steps[i - first.steps.size()];
      const auto& expected = whole.steps[i];
      EXPECT_EQ(got.loss, expected.loss) << "step " << i;
      EXPECT_EQ(got.grad_norm, expected.grad_norm);
      EXPECT_EQ(got.learning_rate, expected.learning_rate);
      EXPECT_EQ(got.epochs, expected.epochs);
      EXPECT_EQ(got.ends_epoch, expected.ends_epoch);
    }
    EXPECT_TRUE(same_weights(second, whole));
    EXPECT_EQ(second.kept, 50);
    EXPECT_EQ(second.average->n_averaged(), 5);
    second.average->copy_to(*second.net);
    const AveragedWeights averaged(*whole.average, *whole.net);
    EXPECT_TRUE(same_weights(second, whole));
  }
}

TEST(TrainerRun, ResumesUnderAnotherStrategy) {
  const auto all = strategies();
  const auto pairs = sweep(all, 2, [](const Strategy&) { return false; });
  Training whole({.stop_after = {.steps = 4}});
  whole.run();
  for (const auto& strategy : pairs) {
    SCOPED_TRACE(strategy.name);
    SharedFolder root;
    Training first({.stop_after = {.steps = 2}, .save = {.folder = root.path()}}, strategy);
    first.run();
    Training second({.stop_after = {.steps = 4}, .save = {.folder = root.path()}});
    second.run();
    ASSERT_EQ(second.steps.size(), 2U);
    for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(second.steps[i].loss, whole.steps[2 + i].loss, 1e-9);
    EXPECT_LT(parameter_difference(*second.net, *whole.net), 1e-8);
  }
}

/// What error feedback keeps is saved; a run that accepts other settings begins without it, also under none.
TEST(TrainerRun, ResumesWhatReductionsInFewerBitsKeep) {
  if (world_size() == 1) return;
  auto coded = strategies().front(), other = coded;
  coded.options.communication = communication_of("reduction=int4, error_feedback, block=64, smallest=200");
  other.options.communication = communication_of("reduction=int8, error_feedback, block=64, smallest=200");
  Training whole({.stop_after = {.steps = 4}}, coded);
  whole.run();
  SharedFolder root;
  SaveOptions save{.folder = root.path()};
  Training first({.stop_after = {.steps = 2}, .save = save}, coded);
  first.run();
  EXPECT_THROWS_WITH(Training({.stop_after = {.steps = 4}, .save = save}, other).run(), "what reductions of another policy keep");
  EXPECT_THROWS_WITH(Training({.stop_after = {.steps = 4}, .save = save}).run(), "communication.policy");
  Training second({.stop_after = {.steps = 4}, .save = save}, coded);
  second.run();
  EXPECT_TRUE(same_weights(second, whole));
  save.other_settings = OtherSettings::kAccept;
  Training plain({.stop_after = {.steps = 5}, .save = save});
  plain.run();
  EXPECT_EQ(plain.resumes.size(), 1U);
  EXPECT_EQ(plain.steps.size(), 1U);
}

TEST(TrainerRun, ComparesWhatMustStayTheSame) {
  SharedFolder root;
  const SaveOptions save{.folder = root.path()};
  Training first(
      {.micro_batches = 2, .stop_after = {.steps = 1}, .save = save, .config = R"({"lr": 0.1, "model": {"width": 3}})"});
  first.run();
  EXPECT_THROWS_WITH(Training({.micro_batches = 2, .seed = 43, .save = save}).run(),
                     "was trained with another seed: TrainerOptions::seed: saved 42, here 43");
  EXPECT_THROWS_WITH(Training({.micro_batches = 1, .stop_after = {.steps = 9}, .save = save}).run(),
                     "a step has 12 rows, but those before the resume had 24");
  Training fewer({.micro_batches = 2, .stop_after = {.steps = 9}, .save = save}); // on 3 and 4 ranks by less than one for each
  fewer.trainer->data(TokenSource{5 * kRows, kTogether - 1, world_rank(), world_size()});
  EXPECT_THROWS_WITH(fewer.run(), "a step has 22 rows, but those before the resume had 24");
  auto accepting = save;
  accepting.other_settings = OtherSettings::kAccept;
  Training second({.micro_batches = 1,
                   .seed = 43,
                   .stop_after = {.steps = 2},
                   .save = accepting,
                   .config = R"({"lr": 0.2, "model": {"width": 3, "heads": 2}})"});
  second.run();
  ASSERT_EQ(second.resumes.size(), 1U);
  EXPECT_EQ(second.resumes[0].differences, (std::vector<std::string>{"lr: saved 0.1, here 0.2", "model.heads: not saved, here 2",
                                                                     "TrainerOptions::seed: saved 42, here 43"}));
}

TEST(TrainerRun, TellsOnEveryRankThatASeekWentPastTheEnd) {
  SharedFolder root;
  Training first({.stop_after = {.steps = 3}, .save = {.folder = root.path()}});
  first.run();
  Training second({.stop_after = {.steps = 9}, .save = {.folder = root.path()}});
  second.trainer->data(TokenSource(world_rank() == last_rank() ? 20 : kRows, kTogether, world_rank(), world_size()));
  EXPECT_THROWS_WITH(second.run(), c10::str("rank ", last_rank(), ": the data source's seek: seek to row 36 of 20"));
}

TEST(TrainerRun, TellsOnEveryRankThatTheStateOfOneCouldNotBeMade) {
  SharedFolder root;
  Training training({.stop_after = {.steps = 1}, .save = {.folder = root.path()}});
  training.trainer->keep("bad", [] {
    TORCH_CHECK(world_rank() != last_rank(), "nothing to keep");
    return StateDict();
  });
  EXPECT_THROWS_WITH(training.run(), c10::str("rank ", last_rank(), ": the state for a checkpoint: nothing to keep"));
}

TEST(TrainerRun, TellsThatAFolderTakesNoCheckpoint) {
  SharedFolder root;
  const auto file = root.path() / "file";
  if (world_rank() == 0) write_text(file, "no folder");
  SharedFolder::barrier();
  Training training({.stop_after = {.steps = 2}, .save = {.folder = (file / "below").string(), .every = {.steps = 1}}});
  EXPECT_THROWS_WITH(training.run(), "file");
}

TEST(TrainerRun, BeginsAnewOnlyInAnEmptyFolder) {
  SharedFolder root;
  const TrainerOptions options{.stop_after = {.steps = 1}, .save = {.folder = root.path(), .resume = Resume::kNever}};
  Training(options).run();
  EXPECT_THROWS_WITH(Training(options).run(), "step-000001 already: a new training needs another folder");
}

TEST(TrainerRun, SavesAndResumesWithoutARun) {
  SharedFolder root;
  Training first({.save = {.folder = root.path()}});
  EXPECT_FALSE(first.trainer->resume());
  first.trainer->step();
  first.trainer->save();
  EXPECT_EQ(first.saves.size(), 1U);
  first.trainer->step();
  Training second({.save = {.folder = root.path()}});
  EXPECT_TRUE(second.trainer->resume());
  EXPECT_EQ(second.trainer->steps(), 1);
  EXPECT_EQ(second.trainer->step().loss, first.steps[1].loss);
  Training none({});
  EXPECT_FALSE(none.trainer->resume());
  EXPECT_THROWS_WITH(none.trainer->save(), "save() needs TrainerOptions::save.folder");
}

// --- evaluations

TEST(TrainerRun, EvaluatesExactlyAndAtTheEnd) {
  Training training({.stop_after = {.steps = 5}, .evaluate = {.steps = 2}});
  std::vector<bool> trains;
  training.trainer->evaluate("valid", valid_source(), [&](const Tokens& batch) {
    trains.push_back(training.net->blocks->is_training());
    auto loss = token_loss_sum(training.net, batch);
    loss.also["rows"] = {.sum = torch::tensor(batch.rows()), .count = 1.0};
    return loss;
  });
  training.trainer->evaluate("averaged", valid_source(), nullptr, &*training.average);
  training.net->blocks->eval(); // as a frozen part may be: it stays so
  training.run();
  ASSERT_EQ(training.evaluations.size(), 6U);
  const auto& last = training.evaluations[4];
  EXPECT_EQ(last.name, "valid");
  EXPECT_EQ(last.step, 5);
  EXPECT_EQ(training.evaluations[0].step, 2);
  EXPECT_FALSE(training.net->blocks->is_training());
  EXPECT_TRUE(training.net->is_training());
  EXPECT_TRUE(training.net->norm->is_training());
  for (const bool each : trains) EXPECT_FALSE(each);
  auto plain = double_net();
  const auto copy = [&] {
    const torch::NoGradGuard no_grad;
    for (auto& item : plain->named_parameters()) item.value().copy_(full(training.net->named_parameters()[item.key()]));
  };
  copy();
  EXPECT_NEAR(last.loss, plain_validation(plain), 1e-9);
  const auto ranks = static_cast<double>(world_size()); // in the last of three batches each of them has one row
  EXPECT_NEAR(last.also.at("rows"), (16 + ranks) / (3 * ranks), 1e-12);
  const AveragedWeights averaged(*training.average, *training.net);
  copy();
  EXPECT_NEAR(training.evaluations[5].loss, plain_validation(plain), 1e-9);
}

TEST(TrainerRun, KeepsTheBestBesideTheNewest) {
  SharedFolder root;
  Training training({.stop_after = {.steps = 8},
                     .save = {.folder = root.path(), .every = {.steps = 2}, .keep = 2, .best = "valid"},
                     .evaluate = {.steps = 2}});
  const std::vector<double> values{3, 1, 2, 4}; // of the evaluations
  size_t evaluation = 0;
  training.trainer->evaluate("valid", valid_source(), [&](const Tokens&) {
    return LossSum{torch::tensor(values[evaluation]), 1.0};
  });
  training.trainer->on_evaluate([&](const EvaluationEvent&, Control&) { ++evaluation; });
  training.trainer->count([](const Tokens&) { return 1.0; });
  training.trainer->loss([&](const Tokens& batch) { return LossSum{token_losses(training.net, batch, at::Reduction::Sum)}; });
  training.run();
  EXPECT_EQ(folders_in(root.path()), (std::set<std::string>{"step-000006", "step-000008", "best", "latest"}));
  auto state = StateDict();
  state.set("trainer.steps", 0);
  checkpoint::load(state, root.path() / "best", {.allow_unused = true});
  EXPECT_EQ(state.value<int64_t>("trainer.steps"), 4);
  int64_t bests = 0;
  for (const auto& save : training.saves) bests += save.is_best ? 1 : 0;
  EXPECT_EQ(bests, 2);
}

/// The evaluation of the end comes after the save of the last step, and changes nothing in it.
TEST(TrainerRun, SavesTheLastStepOnce) {
  SharedFolder root;
  Training training({.stop_after = {.steps = 4}, .save = {.folder = root.path(), .every = {.steps = 2}}});
  training.trainer->evaluate("valid", valid_source());
  training.run();
  std::vector<int64_t> at;
  for (const auto& save : training.saves) at.push_back(save.step);
  EXPECT_EQ(at, (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(training.evaluations.size(), 1U);
}

TEST(TrainerRun, StopsEarlyAndStaysStopped) {
  SharedFolder root;
  const TrainerOptions options{.stop_after = {.steps = 20},
                               .save = {.folder = root.path(), .every = {.steps = 1}},
                               .evaluate = {.steps = 1},
                               .early_stop = EarlyStop{.metric = "valid.score", .patience = 2, .better = Better::kLarger}};
  const std::vector<double> values{1, 3, 2, 3, 9};
  const auto add = [&](Training& training) {
    training.trainer->evaluate("valid", valid_source(), [&](const Tokens& batch) {
      auto loss = token_loss_sum(training.net, batch);
      loss.also["score"] = {.sum = torch::tensor(values[static_cast<size_t>(training.trainer->steps() - 1)]), .count = 1.0};
      return loss;
    });
  };
  Training first(options);
  add(first);
  first.trainer->on_step([](const StepEvent& event, Control& control) { // the patience is counted across a resume
    if (event.step == 3) control.stop("a pause");
  });
  EXPECT_EQ(first.run().steps, 3);
  Training second(options);
  add(second);
  const auto end = second.run();
  EXPECT_EQ(end.reason, StopReason::kEarlyStop);
  EXPECT_EQ(end.steps, 4);
  EXPECT_EQ(end.text, "\"valid.score\" did not improve in 2 evaluations");
  Training third(options);
  add(third);
  EXPECT_EQ(third.run().reason, StopReason::kEarlyStop);
  EXPECT_TRUE(third.steps.empty());
  EXPECT_TRUE(third.evaluations.empty());
  EXPECT_TRUE(third.saves.empty());
}

TEST(TrainerRun, NamesTheEvaluationThatAMetricMeans) {
  Training training({.stop_after = {.steps = 1}, .early_stop = EarlyStop{.metric = "vaild"}});
  EXPECT_THROWS_WITH(training.run(), "early_stop.metric is \"vaild\", but there is no evaluation");
  training.trainer->evaluate("test", valid_source());
  training.trainer->evaluate("valid", valid_source());
  EXPECT_THROWS_WITH(training.run(), "\"vaild\", which no evaluation is called; did you mean \"valid\"?");
  Training other({.stop_after = {.steps = 1}, .early_stop = EarlyStop{.metric = "valid.acuracy"}});
  other.trainer->evaluate("valid", valid_source());
  EXPECT_THROWS_WITH(other.run(), "no evaluation has the number \"valid.acuracy\"; there are valid");
}

TEST(TrainerRun, IsAnErrorOnEveryRankWhereAnEvaluationsDataEndOnOne) {
  Training training({});
  training.trainer->evaluate("valid", TokenSource(world_rank() == last_rank() && world_size() > 1 ? 8 : 16, 8, 0, 1));
  if (world_size() > 1)
    EXPECT_THROWS_WITH(training.trainer->evaluate_now(), "the data of the evaluation \"valid\" have ended on 1 of");
  Training empty({});
  empty.trainer->evaluate("valid", TokenSource(0, 8, 0, 1));
  EXPECT_THROWS_WITH(empty.trainer->evaluate_now(), "the evaluation \"valid\" has no batch");
  Training twice({});
  twice.trainer->evaluate("valid", valid_source()).evaluate("valid", valid_source());
  EXPECT_THROWS_WITH(twice.trainer->evaluate_now(), "two evaluations have the name \"valid\"");
}

TEST(TrainerRun, EvaluatesWhereAFunctionAsksForIt) {
  Training training({.stop_after = {.epochs = 2}});
  training.trainer->evaluate("valid", valid_source());
  training.trainer->on_step([](const StepEvent& event, Control& control) {
    if (event.ends_epoch) control.evaluate();
  });
  training.run();
  ASSERT_EQ(training.evaluations.size(), 2U);
  EXPECT_EQ(training.evaluations[0].step, 4);
  EXPECT_EQ(training.evaluations[1].step, 8);
  EXPECT_EQ(training.trainer->evaluate_now().front().loss, training.evaluations[1].loss);
}

// --- ranks that are threads

TEST(TrainerRun, RunsOnRanksThatAreThreads) {
  if (world_size() > 1 || !tests_the_cpu()) return;
  std::vector<double> losses(2);
  run_ranks_as_threads(2, [&] {
    Training training({.stop_after = {.steps = 3}});
    training.run();
    losses[static_cast<size_t>(process_context().rank())] = training.steps.back().loss;
  });
  EXPECT_EQ(losses[0], losses[1]);
  Training alone({.stop_after = {.steps = 3}});
  alone.run();
  EXPECT_NEAR(losses[0], alone.steps.back().loss, 1e-9);
}

// --- logs

std::vector<nlohmann::json> lines_of(const std::string& file) {
  std::vector<nlohmann::json> lines;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST(TrainerRun, WritesItsNumbersAndDropsLaterLinesAtAResume) {
  SharedFolder root;
  const auto file = (root.path() / "log.jsonl").string();
  const SaveOptions save{.folder = (root.path() / "saved").string(), .every = {.steps = 2}};
  TrainerOptions options{.stop_after = {.steps = 3}, .save = save, .log = {.jsonl = file, .breakdown = true}};
  Training first(options);
  first.run();
  SharedFolder::barrier();
  if (world_rank() == 0) std::filesystem::remove_all(root.path() / "saved" / "step-000003"); // as if it had not come to it
  SharedFolder::barrier();
  options.stop_after.steps = 5;
  options.evaluate.steps = 4;
  Training second(options);
  second.trainer->evaluate("valid", valid_source());
  second.run();
  SharedFolder::barrier();
  if (world_rank() != 0) return;
  std::vector<std::pair<std::string, int64_t>> events;
  double loss = 0;
  for (const auto& line : lines_of(file)) {
    events.emplace_back(line.at("kind"), line.at("step"));
    if (line.at("kind") != "step") continue;
    if (line.at("step") == 3) loss = line.at("loss");
    double parts = 0;
    for (const char* part : {"forward_seconds", "backward_seconds", "norm_seconds", "optimizer_seconds"}) {
      EXPECT_GT(line.at(part).get<double>(), 0) << part;
      parts += line.at(part).get<double>();
    }
    EXPECT_LE(parts, line.at("seconds").get<double>());
  }
  const std::vector<std::pair<std::string, int64_t>> expected{{"step", 1},       {"step", 2}, {"save", 2},       {"resume", 2},
                                                              {"step", 3},       {"step", 4}, {"evaluation", 4}, {"step", 5},
                                                              {"evaluation", 5}, {"save", 4}, {"save", 5},       {"stop", 5}};
  EXPECT_EQ(events, expected);
  EXPECT_EQ(loss, second.steps[0].loss);
}

TEST(TrainerRun, TellsOnEveryRankThatALogCannotBeWritten) {
  SharedFolder root;
  if (world_rank() == 0) write_text(root.path() / "file", "no folder");
  SharedFolder::barrier();
  Training training({.stop_after = {.steps = 1}, .log = {.jsonl = (root.path() / "file" / "log.jsonl").string()}});
  EXPECT_THROWS_WITH(training.run(), "rank 0: the log: ");
}

TEST(TrainerRun, RecordsAWindowOfSteps) {
  SharedFolder root;
  const auto folder = (root.path() / "trace").string();
  Training training({.stop_after = {.steps = 4}, .profile = {.folder = folder, .first_step = 1, .steps = 2}});
  training.run();
  const auto trace = nlohmann::json::parse(read_text(std::filesystem::path(folder) / c10::str("rank-", world_rank(), ".json")));
  int64_t optimizers = 0, collectives = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.value("cat", "") == "collective" &&
        event.value("name", "").find("the agreement before a step") != std::string::npos)
      ++collectives;
    if (event.value("name", "") == "aten::cross_entropy_loss") ++optimizers;
  }
  EXPECT_EQ(optimizers, 2);
  if (world_size() > 1) EXPECT_GE(collectives, 1); // the second step's: the first one's came before the window
}

/// Two small all-reduces a step, and nothing else that the model does not do by itself.
TEST(TrainerRun, ReducesTwiceAStepBesideTheModel) {
  Training training({.stop_after = {.steps = 4}});
  auto& context = process_context();
  std::vector<int64_t> calls;
  training.trainer->on_step([&](const StepEvent&, Control&) {
    calls.push_back(
        context.communicator(world_mesh().rank_list(), at::kCPU, "trainer")->counters().get(CollectiveKind::kAllReduce).calls);
  });
  training.run();
  if (world_size() == 1) return;
  for (size_t i = 1; i < calls.size(); ++i) EXPECT_EQ(calls[i] - calls[i - 1], 3); // the second one is a sum and a maximum
}

} // namespace
} // namespace tessera::testing::trainer_run_test
