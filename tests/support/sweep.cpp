#include "sweep.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

namespace tessera::testing {
namespace {

/// The sweeps of the test that runs.
struct Sweeps {
  std::string test;
  unsigned calls = 0;
};

std::string current_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return test == nullptr ? program_invocation_short_name : std::string(test->test_suite_name()) + "." + test->name();
}

} // namespace

std::mt19937 drawn_generator(std::string_view name, unsigned number) {
  std::vector<unsigned> seeds{static_cast<unsigned>(test_seed()), number};
  seeds.insert(seeds.end(), name.begin(), name.end());
  std::seed_seq sequence(seeds.begin(), seeds.end());
  return std::mt19937(sequence);
}

std::mt19937 next_sweep_generator() {
  static Sweeps sweeps;
  if (auto test = current_test(); test != sweeps.test) sweeps = {std::move(test), 0};
  return drawn_generator(sweeps.test, sweeps.calls++);
}

} // namespace tessera::testing
