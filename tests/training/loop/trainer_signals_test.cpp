// Signals to a training, and ranks that end: real processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/training/loop/program_runs.h>

namespace tessera::testing::trainer_signals_test {
namespace {

constexpr int64_t kMicro = 2;
using Arguments = std::map<std::string, std::string>;

Arguments with(Arguments arguments, const Arguments& more) {
  for (const auto& [name, value] : more) arguments[name] = value;
  return arguments;
}

const Arguments kPlain{{"strategy", "full"}, {"steps", "8"}};

TEST(TrainerSignals, SigtermSavesAndLosesNothing) {
  const auto expected = plain_losses(8, kMicro);
  for (const auto* who : {"all", "0", "1", "launcher"}) {
    SCOPED_TRACE(who);
    const TemporaryFolder root;
    const auto first = run_trainer(3, root.path() / "run", with(kPlain, {{"signal", "term"}, {"tick", "9"}, {"who", who}}));
    EXPECT_EQ(first.status, 0) << first.output;
    EXPECT_EQ(first.end, "terminated") << first.output;
    EXPECT_LT(first.last_step(), 8);
    EXPECT_GE(first.last_step(), 1);
    EXPECT_EQ(first.saved, std::vector<int64_t>{first.last_step()});
    const auto second = run_trainer(2, root.path() / "run", kPlain);
    EXPECT_EQ(second.end, "steps") << second.output;
    EXPECT_EQ(second.first_step(), first.last_step() + 1);
    EXPECT_EQ(second.last_step(), 8);
    EXPECT_LT(largest_difference(first.losses, expected), 1e-9);
    EXPECT_LT(largest_difference(second.losses, expected), 1e-9);
  }
}

/// The state that a resume loads into is made at the first tick.
TEST(TrainerSignals, SigtermInAResumeLosesNothing) {
  for (const auto* who : {"all", "1"}) {
    const TemporaryFolder root;
    auto arguments = kPlain;
    arguments["steps"] = "4";
    run_trainer(2, root.path() / "run", arguments);
    const auto cut = run_trainer(2, root.path() / "run", with(kPlain, {{"signal", "term"}, {"tick", "1"}, {"who", who}}));
    EXPECT_EQ(cut.status, 0) << cut.output;
    EXPECT_EQ(cut.end, "terminated") << cut.output;
    EXPECT_EQ(cut.last_step(), 0) << cut.output;
    EXPECT_EQ(run_trainer(2, root.path() / "run", kPlain).first_step(), 5);
  }
}

/// Each rank gets the signal itself, and again from the launcher: once, that is.
TEST(TrainerSignals, ASignalToTheWholeGroupIsOne) {
  const TemporaryFolder root;
  const auto run = run_trainer(3, root.path() / "run", with(kPlain, {{"signal", "group"}, {"tick", "9"}, {"who", "1"}}),
                               Start::kForkedAsSession);
  EXPECT_EQ(run.status, 0) << run.output;
  EXPECT_EQ(run.end, "terminated") << run.output;
  EXPECT_EQ(run.saved, std::vector<int64_t>{run.last_step()});
}

TEST(TrainerSignals, Sigusr2SavesAndGoesOn) {
  for (const auto* who : {"all", "1"}) {
    const TemporaryFolder root;
    const auto run = run_trainer(2, root.path() / "run", with(kPlain, {{"signal", "usr2"}, {"tick", "9"}, {"who", who}}));
    EXPECT_EQ(run.status, 0) << run.output;
    EXPECT_EQ(run.end, "steps") << run.output;
    ASSERT_GE(run.saved.size(), 2U) << run.output;
    EXPECT_LT(run.saved[0], 8);
    EXPECT_EQ(run.saved.back(), 8);
    EXPECT_EQ(run.last_step(), 8);
  }
}

/// By the default action: 128 + SIGTERM.
TEST(TrainerSignals, ASecondSigtermEndsAtOnce) {
  const TemporaryFolder root;
  const auto run = run_trainer(1, root.path() / "run", with(kPlain, {{"signal", "twice"}, {"tick", "9"}}));
  EXPECT_NE(run.status, 0) << run.output;
  EXPECT_EQ(run.end, "") << run.output;
  EXPECT_NE(run.output.find("signal 15"), std::string::npos) << run.output;
  EXPECT_FALSE(std::filesystem::exists(root.path() / "run" / "latest"));
}

/// The signal comes in the evaluation: it is cut short, and made up for after the resume.
TEST(TrainerSignals, SigtermCutsAnEvaluationShort) {
  const TemporaryFolder root;
  const auto arguments = with(kPlain, {{"evaluate", "2"}, {"strategy", "full"}});
  const auto whole = run_trainer(2, root.path() / "whole", arguments);
  EXPECT_EQ(whole.evaluations.size(), 4U) << whole.output;
  // Reads: 3 before the first step, 2 for each of the next; losses 2 a step; then the evaluation's 3.
  int64_t cut = 0;
  for (int64_t tick = 8; tick <= 12; ++tick) {
    const auto folder = root.path() / std::to_string(tick);
    const auto first = run_trainer(2, folder, with(arguments, {{"signal", "term"}, {"tick", std::to_string(tick)}}));
    EXPECT_EQ(first.end, "terminated") << first.output;
    const auto second = run_trainer(2, folder, arguments);
    EXPECT_EQ(second.end, "steps") << second.output;
    auto evaluations = first.evaluations, losses = first.losses;
    if (evaluations.count(first.last_step()) == 0 && first.last_step() % 2 == 0) ++cut;
    evaluations.insert(second.evaluations.begin(), second.evaluations.end());
    losses.insert(second.losses.begin(), second.losses.end());
    EXPECT_EQ(evaluations, whole.evaluations) << tick; // to the bit
    EXPECT_EQ(losses, whole.losses) << tick;
  }
  EXPECT_GT(cut, 0);
}

TEST(TrainerSignals, AKilledRankCostsTheStepsSinceTheLastSave) {
  const auto expected = plain_losses(8, kMicro);
  const TemporaryFolder root;
  const auto arguments = with(kPlain, {{"save", "2"}});
  const auto first = run_trainer(3, root.path() / "run", with(arguments, {{"signal", "kill"}, {"tick", "24"}, {"who", "2"}}));
  EXPECT_NE(first.status, 0);
  EXPECT_EQ(first.end, "");
  EXPECT_NE(first.output.find("rank 2"), std::string::npos) << first.output;
  ASSERT_FALSE(first.saved.empty()) << first.output;
  const auto second = run_trainer(2, root.path() / "run", arguments);
  EXPECT_EQ(second.end, "steps") << second.output;
  EXPECT_GT(second.first_step(), first.saved.back());
  EXPECT_LE(second.first_step(), first.last_step() + 1);
  EXPECT_LT(largest_difference(first.losses, expected), 1e-9);
  EXPECT_LT(largest_difference(second.losses, expected), 1e-9);
}

/// It cannot be agreed on, since the others wait for what the model sends: the rank ends, and they hear of it.
TEST(TrainerSignals, ALossFunctionThatThrowsOnOneRankEndsTheJob) {
  const TemporaryFolder root;
  const auto run = run_trainer(3, root.path() / "run", with(kPlain, {{"signal", "throw"}, {"tick", "8"}, {"who", "1"}}));
  EXPECT_EQ(run.status, 1) << run.output;
  EXPECT_NE(run.output.find("thrown at its moment"), std::string::npos) << run.output;
  EXPECT_NE(run.output.find("rank 1"), std::string::npos) << run.output;
}

/// The log of runs that were cut off is that of one: a line for each step.
TEST(TrainerSignals, TheLogHasEachStepOnce) {
  const TemporaryFolder root;
  const auto arguments = with(kPlain, {{"save", "2"}});
  run_trainer(2, root.path() / "run", with(arguments, {{"signal", "kill"}, {"tick", "24"}, {"who", "0"}}));
  run_trainer(1, root.path() / "run", arguments);
  std::ifstream file(root.path() / "run.jsonl");
  std::vector<int64_t> steps;
  for (std::string line; std::getline(file, line);) {
    const auto record = nlohmann::json::parse(line);
    if (record.at("kind") == "step") steps.push_back(record.at("step"));
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
}

} // namespace
} // namespace tessera::testing::trainer_signals_test
