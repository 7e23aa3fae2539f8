#include "choose_tests.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/tests/support/sweep.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

namespace tessera::testing {
namespace {

using Names = std::vector<std::string>;

/// The folders of a test and its file, without endings: `tests`, `fsdp`, `schedule`, `prefetch_test`.
std::set<std::string> places(const ::testing::TestInfo& test) {
  std::set<std::string> found;
  for (const auto& part : std::filesystem::path(test.file())) found.insert(part.stem().string());
  return found;
}

struct Choice {
  Names taken, left_out; ///< as `Suite.Test`
};

Choice choice_of(const ::testing::UnitTest& tests, const Names& files) {
  Choice choice;
  std::set<std::string> missing(files.begin(), files.end());
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const auto& suite = *tests.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const auto found = places(*suite.GetTestInfo(j));
      const auto is_here = [&](const std::string& file) { return found.count(file) > 0; };
      const bool is_taken = files.empty() || std::any_of(files.begin(), files.end(), is_here);
      (is_taken ? choice.taken : choice.left_out).push_back(c10::str(suite.name(), ".", suite.GetTestInfo(j)->name()));
      std::erase_if(missing, is_here);
    }
  }
  TORCH_CHECK(missing.empty(), "--files: no test is in ", *missing.begin());
  return choice;
}

/// GoogleTest prints its filter after it has applied it: the one of the command, not the names of all tests.
class ShowFilter final : public ::testing::EmptyTestEventListener {
 public:
  explicit ShowFilter(std::string filter) : filter_(std::move(filter)) {}
  void OnTestProgramStart(const ::testing::UnitTest& /*tests*/) override { GTEST_FLAG_SET(filter, filter_); }

 private:
  const std::string filter_;
};

bool is_drawn(const std::string& test, WorldPlace place) {
  const size_t from_last = place.count - 1 - place.index;
  const bool has_neighbour = place.index > 0 || from_last % 2 == 1;
  return !has_neighbour || drawn_generator(test, static_cast<unsigned>(from_last / 2))() % 2 == from_last % 2;
}

} // namespace

ChosenTests::ChosenTests(::testing::UnitTest& tests, const Names& files) {
  const auto filter = GTEST_FLAG_GET(filter);
  tests.listeners().Append(new ShowFilter(filter));
  const auto [taken, left_out] = choice_of(tests, files);
  const char* const count = std::getenv("TESSERA_TEST_COUNT");
  if (count != nullptr && !full_run() && filter == "*") {
    GTEST_FLAG_SET(filter, c10::Join(":", sweep(taken, std::strtoul(count, nullptr, 10))));
    return;
  }
  if (!full_run() && filter == "*") drawable_ = taken;
  if (!left_out.empty())
    GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" : ":") + c10::Join(":", left_out));
}

bool ChosenTests::draw_for(WorldPlace place) const {
  if (drawable_.empty() || place.count == 1) return true;
  Names drawn;
  for (const auto& test : drawable_)
    if (is_drawn(test, place)) drawn.push_back(test);
  GTEST_FLAG_SET(filter, c10::Join(":", drawn));
  return !drawn.empty();
}

} // namespace tessera::testing
