// The main of every test program.
//   exe            runs its tests in this process, as a job of one rank
//   exe --ranks n  runs them on n local ranks in lockstep; with TESSERA_TEST_HOSTS=0011 as if the last two were on another host
#include "draw_tests.h"
#include "forked_ranks.h"
#include "lockstep.h"
#include "race_reports.h"
#include "test_device.h"

#include <ATen/Context.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/error_text.h>
#include <tessera/collectives/launch.h>
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
  tessera::testing::draw_tests(tests);
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

} // namespace

int main(int argc, char** argv) try {
  const auto ranks = tessera::ranks_from_args(argc, argv);
  ::testing::InitGoogleMock(&argc, argv);
  return ranks ? tessera::testing::run_forked_ranks(*ranks, run_tests) : run_tests();
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", tessera::internal::error_text(error).c_str());
  return 1;
}
