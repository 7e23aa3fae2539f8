#pragma once

#include <gtest/gtest.h>

namespace tessera::testing {

/// For a run on the simulated device. Each test begins with idle streams, whose delays start anew: 0 to
/// TESSERA_TEST_DEVICE_DELAY_US microseconds (default 0), drawn with TESSERA_TEST_SEED (default 1) and the rank. A test ends when
/// the streams are idle again; it fails for every race since it began that it has not reset, and for an error of the device.
void report_races(::testing::UnitTest& tests);

} // namespace tessera::testing
