#pragma once

#include <gtest/gtest.h>

namespace tessera::testing {

/// Makes gtest report for one rank among others: rank 0 reports progress, every rank its failures under "[rank r]", and after
/// each test the ranks tell each other through the store how it went. A rank that does not come to the end of a test in which
/// another one failed, or that failed with an exception or an ASSERT alone, ends the run with a report: the ranks are no longer
/// in step.
void report_in_lockstep(::testing::UnitTest& tests);

} // namespace tessera::testing
