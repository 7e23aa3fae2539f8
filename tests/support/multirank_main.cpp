// The main of every test program.
//   exe                    runs its tests in this process, as a job of one rank
//   exe --ranks 2          runs them on 2 local ranks in lockstep
//   exe --ranks 1,2,3,4    … on 1 rank, then on 2, on 3 and on 4: LibTorch is loaded once, and each test runs on the ones drawn
//   for it exe --hosts 0011,0110  … on 4 ranks as if the last two were on another host, then with the middle two there exe
//   --files schedule,fully_shard_test   takes the tests of these folders and files alone
#include "choose_tests.h"
#include "forked_ranks.h"
#include "lockstep.h"
#include "race_reports.h"
#include "test_arguments.h"
#include "test_device.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/world.h>

#include <cstdio>

namespace {

/// A test draws the same numbers whichever tests ran before it. Every rank draws others.
class SeedTests final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { at::manual_seed(tessera::testing::rank_seed()); }
};

int run_tests() try {
  const bool is_simulated = tessera::testing::test_device_type() == tessera::testing::sim::kDeviceType;
  if (is_simulated) tessera::testing::sim::enable();
  at::globalContext().setAllowTF32CuDNN(false); // the tests compare with fp32
  tessera::init_process_group();
  auto& tests = *::testing::UnitTest::GetInstance();
  if (tessera::process_context().rank() != 0) // --gtest_output: one report, of rank 0
    delete tests.listeners().Release(tests.listeners().default_xml_generator());
  tests.listeners().Append(new SeedTests);
  tessera::testing::report_in_lockstep(tests);
  if (is_simulated) tessera::testing::report_races(tests); // the last to be added hears first that a test ends
  const int status = RUN_ALL_TESTS();
  tessera::destroy_process_group();
  return status;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", tessera::internal::error_text(error).c_str());
  return 1;
}

int run_world(const tessera::testing::TestWorld& world) {
  if (!world.hosts.empty()) setenv("TESSERA_TEST_HOSTS", world.hosts.c_str(), 1);
  return world.ranks == 0 ? run_tests() : tessera::testing::run_forked_ranks(world.ranks, run_tests);
}

/// Each world has a process for itself, so that none finds threads, memory or an environment of the world before.
int run_in_turn(const std::vector<tessera::testing::TestWorld>& worlds, const tessera::testing::ChosenTests& chosen) {
  int failed = 0;
  for (size_t i = 0; i < worlds.size(); ++i) {
    if (!chosen.draw_for({i, worlds.size()})) continue;
    std::printf("[  WORLD   ] %s\n", worlds[i].name().c_str());
    failed += tessera::testing::run_in_child([&] { return run_world(worlds[i]); }) == 0 ? 0 : 1;
  }
  std::printf("[  WORLDS  ] %zu, %d of them failed\n", worlds.size(), failed);
  return failed == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) try {
  const auto arguments = tessera::testing::take_test_arguments(argc, argv);
  ::testing::InitGoogleMock(&argc, argv);
  const tessera::testing::ChosenTests chosen(*::testing::UnitTest::GetInstance(), arguments.files);
  return arguments.worlds.size() == 1 ? run_world(arguments.worlds.front()) : run_in_turn(arguments.worlds, chosen);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", tessera::internal::error_text(error).c_str());
  return 1;
}
