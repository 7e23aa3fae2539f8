// Trainings that are ended at random moments, and go on with other ranks and strategies.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/training/loop/program_runs.h>

namespace tessera::testing::trainer_kills_test {
namespace {

constexpr int64_t kSteps = 12, kSaveEvery = 3;
const std::vector<std::string> kStrategies{"full", "per-parameter", "zero2", "hybrid", "replicate", "tensor"};
const std::vector<std::string> kMicroBatches{"1", "2", "4"}; // of the same rows a step

/// A job: what may change from run to run.
struct Job {
  int ranks;
  std::string strategy, micro_batches;
};

Job draw_job(Draw& draw) {
  const auto ranks = static_cast<int>(1 + draw.below(4));
  const auto& strategy = draw.of(kStrategies);
  return {ranks, strategy, draw.of(kMicroBatches)};
}

/// How a run ends before its time.
struct Ending {
  std::string signal, who;
  int64_t tick;
};

Ending draw_ending(Draw& draw, const Job& job) {
  Ending ending{.signal = draw.chance(50) ? "term" : "kill"};
  ending.who = draw.of(std::vector<std::string>{"all", "launcher", std::to_string(draw.below(job.ranks))});
  ending.tick = 1 + draw.below(40);
  return ending;
}

/// Runs until `ending`, or to the end.
ProgramRun run(const std::filesystem::path& folder, const Job& job, const std::optional<Ending>& ending) {
  std::map<std::string, std::string> arguments{{"strategy", job.strategy},
                                               {"steps", std::to_string(kSteps)},
                                               {"micro", job.micro_batches},
                                               {"save", std::to_string(kSaveEvery)},
                                               {"evaluate", "4"}};
  if (ending) arguments.insert({{"signal", ending->signal}, {"who", ending->who}, {"tick", std::to_string(ending->tick)}});
  return run_trainer(job.ranks, folder, arguments);
}

/// Where the next run begins: behind all steps, or with SIGKILL behind a checkpoint.
void check_what_was_lost(const ProgramRun& ended, const Ending& ending, int64_t next_step) {
  if (ended.losses.empty() || next_step == 0) return;
  if (!ended.end.empty()) {
    EXPECT_EQ(next_step, ended.last_step() + 1) << ended.output;
    return;
  }
  EXPECT_EQ(ending.signal, "kill") << ended.output;
  EXPECT_LE(next_step, ended.last_step() + 2) << ended.output;              // the last line may be unwritten
  EXPECT_GT(next_step, ended.last_step() - 2 * kSaveEvery) << ended.output; // the last save may be unfinished
  if (!ended.saved.empty()) EXPECT_GT(next_step, ended.saved.back()) << ended.output;
}

void run_case(uint64_t number, const std::vector<double>& expected) {
  SCOPED_TRACE(number);
  Draw draw(number);
  const TemporaryFolder root;
  std::optional<std::pair<ProgramRun, Ending>> before;
  ProgramRun last;
  std::map<int64_t, double> evaluations;
  const auto add = [&](ProgramRun next) {
    EXPECT_LT(largest_difference(next.losses, expected), 1e-9) << next.output;
    if (before) check_what_was_lost(before->first, before->second, next.first_step());
    evaluations.insert(next.evaluations.begin(), next.evaluations.end());
    last = std::move(next);
  };
  for (int i = 0; i < 2 && last.end != "steps"; ++i) {
    const auto job = draw_job(draw);
    const auto ending = draw_ending(draw, job);
    SCOPED_TRACE(c10::str(job.ranks, " ranks, ", job.strategy, ", ", job.micro_batches, " micro-batches, ", ending.signal, " of ",
                          ending.who, " at ", ending.tick));
    add(run(root.path() / "run", job, ending));
    before.emplace(last, ending);
  }
  if (last.end != "steps") add(run(root.path() / "run", draw_job(draw), std::nullopt));
  EXPECT_EQ(last.end, "steps") << last.output;
  EXPECT_EQ(last.status, 0) << last.output;
  EXPECT_EQ(evaluations.size(), 3U) << last.output; // after 4, 8 and 12 steps
}

/// TESSERA_TEST_FULL=1: all 200.
TEST(TrainerKills, EndInTheLossesOfAnUninterruptedRun) {
  std::vector<uint64_t> numbers(200);
  std::iota(numbers.begin(), numbers.end(), 1U);
  const auto expected = plain_losses(kSteps, 2);
  for (const auto number : sweep(numbers, 5)) run_case(number, expected);
}

} // namespace
} // namespace tessera::testing::trainer_kills_test
