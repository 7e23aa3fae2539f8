// Jobs that fail or hang: which records their ranks write, and what tessera-trace says of them.
#include <tessera/tests/support/subprocess.h>
#include <tessera/tests/support/temporary_folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace tessera::testing::trace_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ProgramResult run(const std::string& scenario, int ranks, std::map<std::string, std::string> environment) {
  environment.emplace("TESSERA_TIMEOUT_SECONDS", kNeverSeconds);
  auto result = run_program({program_folder() + "/rank_program", scenario, "--ranks", std::to_string(ranks)}, environment,
                            std::chrono::seconds(120));
  EXPECT_THAT(result.left_behind, IsEmpty()) << result.output;
  EXPECT_FALSE(result.timed_out) << result.output;
  return result;
}

std::set<std::string> files_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

std::string merged(const std::filesystem::path& folder) {
  const auto result = run_program({TESSERA_TRACE_TOOL, folder});
  EXPECT_EQ(result.status, 0) << result.output;
  return result.output;
}

TEST(Trace, OfARankThatNeverCallsSaysThatTheOthersWaitForIt) {
  const TemporaryFolder folder;
  const auto made = folder.file("made");
  EXPECT_EQ(run("last_rank_sees_the_others_fail", 3, {{"TESSERA_TIMEOUT_SECONDS", "3"}, {"TESSERA_TRACE_FOLDER", made}}).status,
            1);
  EXPECT_THAT(files_in(made), ElementsAre("rank-0.json", "rank-1.json"));
  EXPECT_THAT(merged(made), AllOf(HasSubstr("of 3 ranks; no file of rank 2\n"),
                                  HasSubstr(" waited in #1 barrier 'the last rank does not come' of group default [0, 1, 2]\n"),
                                  HasSubstr("\n    for rank 2: no file\n"), HasSubstr("Rank 2 is waited for, and has no file."),
                                  HasSubstr("timed out after 3000 ms, waiting for the call of rank 2")));
}

TEST(Trace, OfDifferentCallsShowsThemBesideEachOther) {
  const TemporaryFolder folder;
  EXPECT_EQ(run("different_operations", 4, {{"TESSERA_TRACE_FOLDER", folder.path()}}).status, 1);
  EXPECT_THAT(merged(folder.path()),
              AllOf(HasSubstr("The first call in which the ranks of a group differ\n  group default [0, 1, 2, 3]\n"
                              "    rank 0: #0 broadcast 'weights' (32 bytes of Float, root 0)\n"
                              "    ranks 1-3: #0 all_reduce 'loss' (32 bytes of Float, sum)\n"),
                    HasSubstr("Nobody waits for a rank that has not made its call."),
                    HasSubstr("the ranks of the group called different collectives")));
}

TEST(Trace, OfAHangIsWrittenOnASignalAndTheJobGoesOn) {
  for (const int ranks : {2, 4}) {
    const TemporaryFolder folder;
    const auto result = run("is_traced_in_a_hang", ranks, {{"TESSERA_TRACE_FOLDER", folder.path()}});
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_EQ(files_in(folder.file("hang")).size(), ranks);
    const auto last = std::to_string(ranks - 1);
    const std::string wait = ranks == 2 ? "\n  rank 0 waits" : "\n  ranks 0-2 wait";
    EXPECT_THAT(merged(folder.file("hang")),
                AllOf(HasSubstr(wait + " in #1 all_reduce 'the hang' (40 bytes of Float, sum) of group default [0, "),
                      HasSubstr("\n    for rank " + last + ": last call in it: #0 barrier 'together'\n"),
                      HasSubstr("\nRank " + last + " is waited for, and waits for nobody.\n"), ContainsRegex("0 .* SIGUSR1\n"),
                      HasSubstr("The ranks agree in all calls that they have recorded.")));
  }
}

TEST(Trace, ASignalEndsNoRankThatWaitsForOthersToJoin) {
  for (const std::string calls : {"1000", "0"}) {
    const TemporaryFolder folder;
    const auto result =
        run("is_signalled_while_ranks_join", 3, {{"TESSERA_TRACE_FOLDER", folder.path()}, {"TESSERA_TRACE_CALLS", calls}});
    EXPECT_EQ(result.status, 0) << result.output;
  }
}

TEST(Trace, OfAGroupThatARankDoesNotMakeNamesTheRank) {
  const TemporaryFolder folder;
  const auto result =
      run("orders_of_ranks_differ", 3, {{"TESSERA_TIMEOUT_SECONDS", "3"}, {"TESSERA_TRACE_FOLDER", folder.path()}});
  EXPECT_EQ(result.status, 1);
  const auto report = merged(folder.path());
  EXPECT_THAT(report, HasSubstr("  ranks 0, 2 waited in connect of group default [0, 1, 2]\n"
                                "    for rank 1: no such group so far\n"));
}

TEST(Trace, IsWrittenOnlyWhereItIsAskedForAndByNoForkedChild) {
  const TemporaryFolder folder;
  const auto forked = run("forked_child_uses_the_group", 2, {{"TESSERA_TRACE_FOLDER", folder.path()}});
  EXPECT_EQ(forked.status, 0) << forked.output;
  EXPECT_THAT(files_in(folder.path()), IsEmpty());
  const auto signalled = run("forked_child_is_signalled", 2, {{"TESSERA_TRACE_FOLDER", folder.path()}});
  EXPECT_EQ(signalled.status, 0) << signalled.output;
  EXPECT_THAT(files_in(folder.path()), IsEmpty());
}

TEST(Trace, ThatCannotBeWrittenIsOneWarningAndHidesNoError) {
  const auto result = run("different_operations", 2, {{"TESSERA_TRACE_FOLDER", "/proc/tessera"}});
  EXPECT_EQ(result.status, 1);
  const std::string warning = "TESSERA_TRACE_FOLDER: cannot write the trace /proc/tessera/rank-0.json: ";
  EXPECT_THAT(result.output, AllOf(HasSubstr(warning), HasSubstr("the ranks of the group called different collectives:")));
  EXPECT_EQ(result.output.find(warning), result.output.rfind(warning));
}

TEST(Trace, IsOfNoCallsWhereNoneAreKept) {
  const TemporaryFolder folder;
  const auto result = run("different_operations", 2, {{"TESSERA_TRACE_FOLDER", folder.path()}, {"TESSERA_TRACE_CALLS", "0"}});
  EXPECT_THAT(result.output, HasSubstr("the ranks of the group called different collectives:"));
  EXPECT_THAT(files_in(folder.path()), IsEmpty());
}

} // namespace
} // namespace tessera::testing::trace_test
