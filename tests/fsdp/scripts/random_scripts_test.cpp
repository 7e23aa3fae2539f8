// Random programs act on a sharded model as on its unsharded twin. CONTRIBUTING.md says how to add an action, and replay.h how to
// look at a script that fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include <torch/types.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/scripts/replay.h>
#include <tessera/tests/fsdp/scripts/script.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/test_device.h>

namespace tessera::testing::scripts::random_scripts_test {
namespace {

constexpr int64_t kMostFailures = 5; ///< then the rest is not run

class RandomScripts : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
  void TearDown() override { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }

  SharedFolder folder_;
};

/// How many scripts there are for a number of ranks, and how many of them `scripts/test` takes: about 20 s on two cores.
struct Share {
  uint64_t all;
  size_t subset;
};
using Shares = std::array<Share, 4>;                                         // on 1 to 4 ranks
constexpr Shares kShares{{{8000, 150}, {6000, 45}, {3500, 30}, {2500, 22}}}; // 20,000
constexpr Shares kSharesInParallel{{{500, 20}, {1500, 12}, {1000, 8}, {2000, 8}}};
constexpr Shares kSharesInLowPrecision{{{5000, 50}, {5000, 15}, {5000, 10}, {5000, 8}}};

std::vector<uint64_t> scripts(const Shares& shares, uint64_t first) {
  const auto index = std::min(static_cast<size_t>(process_context().world_size()), shares.size()) - 1;
  std::vector<uint64_t> seeds(shares[index].all);
  for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = first + shares.size() * i + index; // others than on other numbers of ranks
  if (const auto script = Replay::from_environment().script) {                            // of one of the tests
    const auto range = *script >= kFirstInParallel       ? kFirstInParallel
                       : *script >= kFirstInLowPrecision ? kFirstInLowPrecision
                                                         : 0;
    return range == first ? std::vector{*script} : std::vector<uint64_t>();
  }
  if (const auto range = Replay::from_environment().range) {
    const auto place = [&](size_t number) { return seeds.begin() + static_cast<std::ptrdiff_t>(std::min(number, seeds.size())); };
    return {place(range->first), place(range->second + 1)};
  }
  return sweep(seeds, shares[index].subset / (tests_the_cpu() ? 1 : 2)); // a script takes up to twice as long elsewhere
}

/// The steps up to the failure that it does not need.
std::set<int64_t> steps_to_spare(uint64_t seed, const ScriptFailure& failure, const std::filesystem::path& folder) {
  std::set<int64_t> spared;
  for (int64_t step = failure.step - 1; step >= 0; --step) {
    auto tried = spared;
    tried.insert(step);
    if (run_script(seed, folder / c10::str("without-", step), tried)) spared = tried; // checkpoints are never changed
  }
  return spared;
}

std::string again(uint64_t seed) {
  return c10::str("\n  again: TESSERA_SCRIPT=", seed,
                  " TESSERA_SCRIPT_SHRINK=1 build/release/bin/tests/fsdp_tests --files random_scripts_test --ranks ",
                  process_context().world_size());
}

std::string text_of(uint64_t seed, const ScriptFailure& failure) {
  return c10::str("script ", seed, "\n", failure.report, again(seed));
}

/// On the simulated device: names the script, or the one after it that got its memory. Nothing waits here for the device.
void expect_no_races(uint64_t seed) {
  if (test_device_type() != sim::kDeviceType) return;
  for (const auto& [race, times] : sim::races()) ADD_FAILURE() << "script " << seed << ": a race: " << race << again(seed);
  sim::reset_races();
}

void run(const std::vector<uint64_t>& seeds, const std::filesystem::path& folder) {
  if (seeds.empty()) GTEST_SKIP() << "the environment names none of the scripts that this test has on so many ranks";
  int64_t failures = 0;
  for (const uint64_t seed : seeds) {
    std::optional<ScriptFailure> failure;
    try {
      failure = run_script(seed, folder);
    } catch (const std::exception&) { // the ranks are no longer in step
      ADD_FAILURE() << "script " << seed;
      throw;
    }
    expect_no_races(seed);
    if (!failure) continue;
    std::string spared;
    if (Replay::from_environment().shrinks) {
      for (const int64_t step : steps_to_spare(seed, *failure, folder)) spared += c10::str(' ', step);
    }
    ADD_FAILURE() << text_of(seed, *failure) << (spared.empty() ? "" : "\n  it fails without the steps" + spared);
    ASSERT_FALSE(failure->ranks_disagree);
    if (++failures == kMostFailures) break;
  }
}

TEST_F(RandomScripts, ActOnAShardedModelAsOnItsTwin) { run(scripts(kShares, 0), folder_.path()); }

/// Its step `minimize` takes unsharded models far apart that are a rounding apart, and the sharded one from its twin.
TEST_F(RandomScripts, ComparesNoFurtherThanRoundingLets) {
  if (process_context().world_size() != 3 || Replay::from_environment().script) GTEST_SKIP() << "script 9490 is of 3 ranks";
  run({9490}, folder_.path());
}

TEST_F(RandomScripts, RoundAsATwinThatEmulatesThePolicy) {
  if (!tests_the_cpu()) GTEST_SKIP() << "the twin is on the CPU, and other kernels and another autocast round otherwise";
  run(scripts(kSharesInLowPrecision, kFirstInLowPrecision), folder_.path());
}

TEST_F(RandomScripts, SplitAModelAsItsTwinIsWhole) {
  if (!tests_the_cpu()) GTEST_SKIP() << "tensor parallelism runs on the CPU here";
  run(scripts(kSharesInParallel, kFirstInParallel), folder_.path());
}

} // namespace
} // namespace tessera::testing::scripts::random_scripts_test
