#include "race_reports.h"

#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/world.h>

#include <cstdlib>
#include <exception>

namespace tessera::testing {

namespace {

class RaceReports final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    const char* const delay = std::getenv("TESSERA_TEST_DEVICE_DELAY_US");
    const int max_us = delay != nullptr ? std::atoi(delay) : 0;
    sim::configure({.delays = {.seed = rank_seed(), .max_us = max_us, .slow_factor = 4}});
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
