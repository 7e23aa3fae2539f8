// A job whose rank is killed during a save leaves only whole checkpoints behind, the last one among them.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/save/catalog.h>
#include <torch/torch.h>

#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::checkpoint::crash_test {
namespace {

constexpr int kRanks = 2;

int64_t load_step(const std::filesystem::path& checkpoint) {
  StateDict state;
  state.set("step", 0);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < 3; ++i) state.add(c10::str("rank", rank, ".t", i), torch::zeros({300'000}));
  }
  load(state, checkpoint);
  const auto step = state.value<int64_t>("step");
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) continue;
    EXPECT_TRUE((state.tensor(entry.name) == static_cast<double>(step)).all().item<bool>()) << entry.name;
  }
  return step;
}

int64_t last_saved(const std::string& output) {
  const auto at = output.rfind("saved ");
  return at == std::string::npos ? 0 : std::stoll(output.substr(at + 6));
}

testing::ProgramResult run_until_killed(const std::filesystem::path& root, int seed) {
  return testing::run_program({testing::program_folder() + "/checkpoint_crash_helper", "--ranks", std::to_string(kRanks), root,
                               std::to_string(seed), "300000"},
                              {}, std::chrono::seconds(60), testing::Start::kForked);
}

TEST(Crash, AKilledRankLeavesOnlyWholeCheckpoints) {
  std::vector<int> seeds(200);
  std::iota(seeds.begin(), seeds.end(), 0);
  seeds = testing::sweep(seeds, 6);
  int torn = 0;
  for (const int seed : seeds) {
    SCOPED_TRACE(c10::str("seed ", seed));
    const testing::TemporaryFolder root;
    const auto result = run_until_killed(root.path(), seed);
    ASSERT_NE(result.status, 0);
    EXPECT_TRUE(result.left_behind.empty());
    const auto reported = last_saved(result.output);
    ASSERT_GE(reported, 1) << result.output;
    for (const auto& entry : std::filesystem::directory_iterator(root.path())) {
      const auto name = entry.path().filename().string();
      torn += name.starts_with('.');
      if (name.starts_with('.')) continue;
      EXPECT_TRUE(verify(entry.path()).empty()) << entry.path();
      EXPECT_EQ(name == "latest" ? name : c10::str("step-", load_step(entry.path())), name);
    }
    // The kill may fall between the commit and the report.
    EXPECT_THAT(load_step(latest(root.path())), ::testing::AllOf(::testing::Ge(reported), ::testing::Le(reported + 1)));
    EXPECT_THAT(load_step(root.path() / "latest"), ::testing::AllOf(::testing::Ge(reported), ::testing::Le(reported + 1)));
    // The next save goes on, and removes what was torn.
    StateDict state;
    state.set("step", 0);
    for (int64_t step = 1; step <= reported + 2; ++step) {
      SaveOptions options;
      options.overwrite = true;
      save(state, root.path() / c10::str("step-", step), options);
    }
    for (const auto& entry : std::filesystem::directory_iterator(root.path()))
      EXPECT_FALSE(entry.path().filename().string().starts_with('.'));
  }
  std::printf(
      "%zu kills during a save: the last checkpoint loaded every time; %d unfinished folders were left, none taken for a "
      "checkpoint\n",
      seeds.size(), torn);
}

} // namespace
} // namespace tessera::checkpoint::crash_test
