// The main of every test program.
//   exe            runs its tests in this process, as a job of one rank
//   exe --ranks n  runs them on n local ranks in lockstep
#include "lockstep.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>

#include <cstdio>

namespace {

int run_tests() {
  tessera::init_process_group();
  auto& tests = *::testing::UnitTest::GetInstance();
  if (tessera::process_context().rank() != 0) // --gtest_output: one report, of rank 0
    delete tests.listeners().Release(tests.listeners().default_xml_generator());
  tessera::testing::report_in_lockstep(tests);
  const int status = RUN_ALL_TESTS();
  tessera::destroy_process_group();
  return status;
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto ranks = tessera::ranks_from_args(argc, argv);
    ::testing::InitGoogleMock(&argc, argv);
    if (!ranks) return run_tests();
    return tessera::launch(*ranks, [] { TORCH_CHECK(run_tests() == 0, "tests failed, see above"); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
