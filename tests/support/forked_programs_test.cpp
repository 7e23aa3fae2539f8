// A program that is forked from a zygote is as one that is executed.
#include "forked_programs.h"

#include <c10/util/StringUtil.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string>

#include "matchers.h"
#include "sanitized.h"
#include "spawn_program.h"
#include "subprocess.h"
#include "temporary_folder.h"

namespace tessera::testing::forked_programs_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ProgramResult run(std::vector<std::string> arguments, Start start, const std::map<std::string, std::string>& environment = {}) {
  arguments.insert(arguments.begin(), program_folder() + "/started_program");
  auto result = run_program(arguments, environment, std::chrono::seconds(60), start);
  EXPECT_THAT(result.left_behind, IsEmpty());
  return result;
}

/// Runs it from a script, as a test in Python does.
ProgramResult run_from_script(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment) {
  const auto program = program_folder() + "/started_program";
  std::vector<std::string> words{program_folder() + "/forked_start",
                                 "--beside",
                                 program_folder(),
                                 program,
                                 "--",
                                 "/bin/sh",
                                 "-c",
                                 "exec \"$@\"",
                                 "sh",
                                 program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  auto result = run_program(words, environment);
  EXPECT_THAT(result.left_behind, IsEmpty());
  const auto added = "variable TESSERA_TEST_FORKED=" + program + "\n";
  if (const auto at = result.output.find(added); at != std::string::npos) result.output.erase(at, added.size());
  return result;
}

/// Runs it in all ways, which shall be the same, and returns the output.
std::string run_all(const std::vector<std::string>& arguments, int status, std::map<std::string, std::string> environment = {}) {
  environment["PWD"] = std::filesystem::current_path().string(); // which a shell sets
  const auto executed = run(arguments, Start::kExecuted, environment), forked = run(arguments, Start::kForked, environment);
  EXPECT_EQ(executed.status, status) << executed.output;
  EXPECT_EQ(forked.status, status) << forked.output;
  EXPECT_EQ(forked.output, executed.output);
  const auto from_script = run_from_script(arguments, environment);
  EXPECT_EQ(from_script.status, status) << from_script.output;
  EXPECT_EQ(from_script.output, executed.output);
  return forked.output;
}

/// The working directory of this process while it lives.
class CurrentFolder {
 public:
  explicit CurrentFolder(const std::filesystem::path& folder) : before_(std::filesystem::current_path()) {
    std::filesystem::current_path(folder);
  }
  ~CurrentFolder() { std::filesystem::current_path(before_); }
  CurrentFolder(const CurrentFolder&) = delete;
  CurrentFolder& operator=(const CurrentFolder&) = delete;

 private:
  const std::filesystem::path before_;
};

TEST(ForkedProgram, IsGivenWhatAnExecutedOneIs) {
  const auto first = run_all({"show", "", "two words", "--ranks", "=x"}, 0, {{"STARTED_PROGRAM", "a=b c"}, {"EMPTY", ""}});
  EXPECT_THAT(first, HasSubstr("argument ''\nargument 'two words'\nargument '--ranks'\nargument '=x'\n"));
  EXPECT_THAT(first, HasSubstr("variable STARTED_PROGRAM=a=b c\n"));
  EXPECT_THAT(first, HasSubstr("on stderr\n"));
  const auto second = run_all({"show"}, 0); // which has nothing of the first
  EXPECT_THAT(second, Not(HasSubstr("STARTED_PROGRAM")));
  EXPECT_THAT(second, Not(HasSubstr("two words")));
}

TEST(ForkedProgram, IsInTheWorkingDirectoryOfTheCaller) {
  const TemporaryFolder folder;
  const CurrentFolder here(folder.path());
  const auto path = std::filesystem::canonical(folder.path()).string();
  EXPECT_THAT(run_all({"show"}, 0), HasSubstr("in " + path + ", "));
}

TEST(ForkedProgram, InheritsDescriptorsLimitsAndSignals) {
  const int inherited = fcntl(STDIN_FILENO, F_DUPFD, 77), closed = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 78);
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit lower{before.rlim_cur - 1, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &lower);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  auto* const handler = std::signal(SIGHUP, SIG_IGN);
  const auto output = run_all({"show"}, 0);
  std::signal(SIGHUP, handler);
  pthread_sigmask(SIG_UNBLOCK, &blocked, nullptr);
  setrlimit(RLIMIT_NOFILE, &before);
  close(inherited);
  close(closed);
  EXPECT_THAT(output, ContainsRegex(c10::str(" 77 [0-9 ]*of ", lower.rlim_cur, ", signals 1 not default[^,]* 12 blocked")));
}

TEST(ForkedProgram, EndsWithItsStatusOrSignal) {
  EXPECT_EQ(run_all({"exit", "0"}, 0), "a static object is destroyed\n");
  EXPECT_EQ(run_all({"exit", "3"}, 3), "a static object is destroyed\n");
  EXPECT_EQ(run_all({"other"}, 0), "a static object is destroyed\n");
  EXPECT_EQ(run_all({"raise", "9"}, 137), "");
  EXPECT_EQ(run_all({"raise", "15"}, 143), "");
  EXPECT_EQ(run_all({"raise", "6"}, 134), "");
}

TEST(ForkedProgram, LeadsASessionWhereItShall) {
  EXPECT_THAT(run({"show"}, Start::kForked).output, HasSubstr("in a session, in a group\n"));
  const auto output = run({"show"}, Start::kForkedAsSession).output;
  EXPECT_THAT(output, HasSubstr("leads a session, leads a group\n"));
  EXPECT_THAT(output, HasSubstr("argument '" + program_folder() + "/started_program'\nargument 'show'\n"));
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::ranges::sort(lines);
  return lines;
}

TEST(ForkedProgram, StartsItsRanksAsAnExecutedOneDoes) {
  for (const int ranks : {1, 3}) {
    const std::vector<std::string> arguments{"launch", "--ranks", std::to_string(ranks)};
    const auto executed = run(arguments, Start::kExecuted, {{"STARTED_PROGRAM", "here"}});
    const auto forked = run(arguments, Start::kForked, {{"STARTED_PROGRAM", "here"}});
    EXPECT_EQ(executed.status, 0) << executed.output;
    EXPECT_EQ(forked.status, 0) << forked.output;
    EXPECT_EQ(sorted_lines(forked.output), sorted_lines(executed.output));
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(forked.output, HasSubstr(c10::str("rank ", rank, " of ", ranks, ", launch --ranks ", ranks, ", a child, ")));
  }
}

TEST(ForkedProgram, StartsItselfAsAnExecutedOneDoes) {
  const std::vector<std::string> arguments{"again", "--ranks", "2"};
  const std::map<std::string, std::string> environment{{"STARTED_PROGRAM", "here"}};
  const auto executed = run(arguments, Start::kExecuted, environment), forked = run(arguments, Start::kForked, environment);
  EXPECT_EQ(executed.status, 0) << executed.output;
  EXPECT_EQ(forked.status, 0) << forked.output;
  EXPECT_EQ(sorted_lines(forked.output), sorted_lines(executed.output));
  EXPECT_THAT(forked.output, ContainsRegex("with descriptors 0 1 2 [0-9 ]*55"));
  EXPECT_THAT(forked.output, HasSubstr("in a session, leads a group\n"));
  EXPECT_THAT(forked.output, HasSubstr("rank 1 of 2, again --ranks 2, a child, "));
}

TEST(ForkedProgram, IsFoundInItsFolder) {
  const auto folder = std::filesystem::path(program_folder());
  const auto program = (folder / "started_program").string();
  for (const auto& above : {folder, folder.parent_path()}) {
    const auto result =
        run_program({folder / "forked_start", "--beside", folder.parent_path(), program, "--", "/bin/sh", "-c",
                     "exec \"$1/" + std::filesystem::path(program).lexically_relative(above).string() + "\" show", "sh", above});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("argument '" + program + "'\nargument 'show'\n"));
    EXPECT_THAT(result.output, HasSubstr("variable TESSERA_TEST_FORKED=" + program + "\n"));
  }
}

TEST(ForkedProgram, IsKilledAtTheTimeoutWithItsRanks) {
  const auto result =
      run_program({program_folder() + "/started_program", "launch", "--ranks", "2"}, {}, std::chrono::seconds(0), Start::kForked);
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.status, 137);
  EXPECT_THAT(result.left_behind, IsEmpty());
}

TEST(ForkedProgram, IsExecutedWhereItsVariablesAreReadBeforeMain) {
  const auto program = program_folder() + "/started_program";
  EXPECT_EQ(may_be_forked(program, variables_of_child({{"STARTED_PROGRAM", "here"}})), !kIsSanitized);
  for (const std::string name : {"OMP_NUM_THREADS", "LD_BIND_NOW", "TESSERA_TRACE_FOLDER", "TORCH_SHOW_CPP_STACKTRACES"})
    EXPECT_FALSE(may_be_forked(program, variables_of_child({{name, "17"}}))) << name;
}

TEST(ForkedProgram, ThatCannotBeStartedIsAnError) {
  const auto no_program = program_folder() + "/no_such_program";
  EXPECT_THROWS_WITH(run_program({no_program}, {}, std::chrono::seconds(1), Start::kForked), "cannot start " + no_program);
}

TEST(ForkedProgram, MayBeAny) {
  for (const auto start : {Start::kExecuted, Start::kForked}) {
    const auto result = run_program({"/bin/echo", "one", "two"}, {}, std::chrono::seconds(60), start);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_EQ(result.output, "one two\n");
  }
}

} // namespace
} // namespace tessera::testing::forked_programs_test
