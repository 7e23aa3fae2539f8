#include "race_reports.h"

#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/world.h>

#include <cstdint>
#include <cstdlib>
#include <exception>

namespace tessera::testing {

namespace {

uint64_t number_of(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

class RaceReports final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    constexpr uint64_t kRanks = 1000; // seeds of no two ranks are alike
    sim::configure({.delays = {.seed = number_of("TESSERA_TEST_SEED", 1) * kRanks + static_cast<uint64_t>(world_rank()),
                               .max_us = static_cast<int>(number_of("TESSERA_TEST_DEVICE_DELAY_US", 0)),
                               .slow_factor = 4}});
    sim::reset_races();
  }

  void OnTestEnd(const ::testing::TestInfo&) override {
    try {
      sim::synchronize();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "work on the device ended with: " << error.what();
    }
    for (const auto& [race, times] : sim::races()) ADD_FAILURE() << "a race, found " << times << " times: " << race;
  }
};

} // namespace

void report_races(::testing::UnitTest& tests) { tests.listeners().Append(new RaceReports); }

} // namespace tessera::testing
