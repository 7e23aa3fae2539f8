#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::testing {

/// Makes GoogleTest run only tests whose file or one of whose folders is among `files` (without endings; none: all tests), and of
/// these only what `--gtest_filter` leaves. Without a filter and with TESSERA_TEST_COUNT=n it takes n of them alone, drawn with
/// TESSERA_TEST_SEED as `sweep` draws cases, but all with TESSERA_TEST_FULL=1. Throws an error for a name that fits no test.
void choose_tests(::testing::UnitTest& tests, const std::vector<std::string>& files);

} // namespace tessera::testing
