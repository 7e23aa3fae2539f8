#include <gmock/gmock.h>

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/scoped_environment.h>
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/test_arguments.h>

namespace tessera::testing::choose_tests_test {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// What is left of the arguments after the tests' own were taken.
struct Taken {
  TestArguments arguments;
  std::vector<std::string> left;
};

Taken take(std::vector<std::string> words) {
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  int count = static_cast<int>(pointers.size());
  pointers.push_back(nullptr);
  Taken taken{take_test_arguments(count, pointers.data()), {}};
  for (int i = 0; i < count; ++i) taken.left.emplace_back(pointers[i]);
  EXPECT_EQ(pointers[count], nullptr);
  return taken;
}

std::vector<std::string> names(const std::vector<TestWorld>& worlds) {
  std::vector<std::string> found;
  for (const auto& world : worlds) found.push_back(world.name());
  return found;
}

TEST(TestArguments, WorldsAndFilesAreTakenOut) {
  const auto none = take({"tests", "--gtest_filter=A.*"});
  EXPECT_THAT(names(none.arguments.worlds), ElementsAre("this process"));
  EXPECT_THAT(none.arguments.files, ElementsAre());
  EXPECT_THAT(none.left, ElementsAre("tests", "--gtest_filter=A.*"));
  const auto all = take({"tests", "--ranks", "1,3", "--files=schedule,api_test", "--gtest_brief=1", "--hosts", "0011"});
  EXPECT_THAT(names(all.arguments.worlds), ElementsAre("1 rank", "3 ranks", "4 ranks on hosts 0011"));
  EXPECT_THAT(all.arguments.files, ElementsAre("schedule", "api_test"));
  EXPECT_THAT(all.left, ElementsAre("tests", "--gtest_brief=1"));
}

TEST(TestArguments, WhatIsWrongIsNamed) {
  EXPECT_THROWS_WITH(take({"tests", "--ranks"}), "--ranks needs a value");
  EXPECT_THROWS_WITH(take({"tests", "--ranks", "2,x"}), "--ranks needs a number, not 'x'");
  EXPECT_THROWS_WITH(take({"tests", "--ranks=0"}), "--ranks needs a number, not '0'");
}

std::string run_this(const std::vector<std::string>& arguments) {
  std::vector<std::string> words{program_folder() + "/support_tests"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_program(words, {}, std::chrono::seconds(60), Start::kForked).output;
}

TEST(ChooseTests, FilesAndRoomsRunAloneInEachWorld) {
  const ScopedEnvironment full("TESSERA_TEST_FULL", "1");
  const auto output = run_this({"--files", "sweep_test", "--ranks", "1,2"});
  EXPECT_THAT(output, HasSubstr("[  WORLD   ] 1 rank\n"));
  EXPECT_THAT(output, HasSubstr("[  WORLDS  ] 2, 0 of them failed"));
  EXPECT_THAT(output, HasSubstr("[       OK ] Sweep."));
  EXPECT_THAT(output, Not(HasSubstr("[       OK ] ChooseTests.")));
  EXPECT_THAT(run_this({"--files", "no_such_room"}), HasSubstr("--files: no test is in no_such_room"));
}

/// The worlds in which each test of sweep_test.cpp ran.
std::map<std::string, std::vector<std::string>> worlds_of_tests(const std::string& seed) {
  const ScopedEnvironment drawn("TESSERA_TEST_FULL", "0"), seeded("TESSERA_TEST_SEED", seed.c_str());
  std::istringstream output(run_this({"--files", "sweep_test", "--ranks", "1,2,3"}));
  std::map<std::string, std::vector<std::string>> worlds;
  std::string world;
  for (std::string line; std::getline(output, line);) {
    if (line.starts_with("[  WORLD   ] ")) world = line.substr(13);
    if (line.starts_with("[       OK ] ")) worlds[line.substr(13, line.find(' ', 13) - 13)].push_back(world);
  }
  return worlds;
}

TEST(ChooseTests, ATestRunsInOneOfTwoNeighbouringWorlds) {
  std::set<std::string> drawn;
  for (const auto* seed : {"1", "2"}) {
    const auto worlds = worlds_of_tests(seed);
    EXPECT_EQ(worlds.size(), 7U);
    for (const auto& [test, ran] : worlds) {
      EXPECT_THAT(ran, ElementsAre("1 rank", AnyOf("2 ranks", "3 ranks"))) << test;
      drawn.insert(ran.back());
    }
  }
  EXPECT_EQ(drawn.size(), 2U);
}

TEST(ChooseTests, AFilterChoosesAmongTheFiles) {
  const auto output = run_this({"--files", "choose_tests_test", "--gtest_filter=*WhatIsWrongIsNamed:Sweep.*-*Nothing*"});
  EXPECT_THAT(output, HasSubstr("[  PASSED  ] 1 test."));
}

} // namespace
} // namespace tessera::testing::choose_tests_test
