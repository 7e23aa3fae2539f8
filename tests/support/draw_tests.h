#pragma once

#include <gtest/gtest.h>

namespace tessera::testing {

/// With TESSERA_TEST_COUNT=n, this run takes n tests of the program alone, drawn with TESSERA_TEST_SEED as `sweep` draws cases.
/// All of them with TESSERA_TEST_FULL=1, and where a filter already chooses.
void draw_tests(const ::testing::UnitTest& tests);

} // namespace tessera::testing
