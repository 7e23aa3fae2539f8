#include "draw_tests.h"

#include <c10/util/StringUtil.h>
#include <tessera/tests/support/sweep.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace tessera::testing {

void draw_tests(const ::testing::UnitTest& tests) {
  const char* const count = std::getenv("TESSERA_TEST_COUNT");
  if (count == nullptr || full_run() || GTEST_FLAG_GET(filter) != "*") return;
  std::vector<std::string> names;
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const auto& suite = *tests.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) names.push_back(c10::str(suite.name(), ".", suite.GetTestInfo(j)->name()));
  }
  GTEST_FLAG_SET(filter, c10::Join(":", sweep(names, std::strtoul(count, nullptr, 10))));
}

} // namespace tessera::testing
