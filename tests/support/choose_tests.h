#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::testing {

/// One of the worlds, from the smallest to the largest, in which a program runs its tests one after the other.
struct WorldPlace {
  size_t index = 0; ///< of `count`
  size_t count = 1;
};

/// The tests that a program runs.
class ChosenTests {
 public:
  /// Makes GoogleTest run only tests whose file or one of whose folders is among `files` (without endings; none: all tests), and
  /// of these only what `--gtest_filter` leaves. Without a filter and with TESSERA_TEST_COUNT=n it takes n of them alone, drawn
  /// with TESSERA_TEST_SEED as `sweep` draws cases, but all with TESSERA_TEST_FULL=1. Throws an error for a name that fits no
  /// test.
  ChosenTests(::testing::UnitTest& tests, const std::vector<std::string>& files);

  /// Leaves to the world at `place` what is drawn for it, and says whether that is anything. A test runs in one of two
  /// neighbouring worlds: of four on 1 or 2 and on 3 or 4 ranks, of three always in the first. All are left where a filter or a
  /// number chose the tests, and with TESSERA_TEST_FULL=1.
  bool draw_for(WorldPlace place) const;

 private:
  std::vector<std::string> drawable_; ///< as `Suite.Test`; none: nothing is drawn
};

} // namespace tessera::testing
