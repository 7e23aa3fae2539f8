#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/trace/flight_recorder.h>
#include <tessera/collectives/trace/job_trace.h>
#include <tessera/collectives/trace/trace_file.h>
#include <nlohmann/json.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <thread>

namespace tessera::internal::flight_recorder_test {
namespace {

using State = RecordedCall::State;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

RecordedGroup group_of(std::vector<int64_t> ranks, int rank = 0) {
  return {.name = "default", .device = "cpu", .ranks = std::move(ranks), .rank = rank};
}

uint64_t issue(FlightRecorder& recorder, const std::string& label, CollectiveKind kind = CollectiveKind::kAllReduce,
               int peer = -1) {
  return recorder.issue({.group = 0, .kind = kind, .label = label, .dtype = at::kFloat, .bytes = 64, .peer = peer});
}

TEST(FlightRecorder, KeepsTheLastCallsInOrder) {
  for (const size_t capacity : {1, 2, 5, 12, 13}) {
    FlightRecorder recorder(capacity);
    recorder.add_group(group_of({0, 1}));
    EXPECT_TRUE(recorder.snapshot().calls.empty());
    for (int i = 0; i < 12; ++i) issue(recorder, "call " + std::to_string(i));
    const auto taken = recorder.snapshot();
    EXPECT_EQ(taken.issued, 12);
    EXPECT_EQ(taken.groups[0].issued, 12);
    ASSERT_EQ(taken.calls.size(), std::min<size_t>(capacity, 12));
    for (size_t i = 0; i < taken.calls.size(); ++i) {
      const auto number = 12 - taken.calls.size() + i;
      EXPECT_EQ(taken.calls[i].number, number);
      EXPECT_EQ(taken.calls[i].sequence, static_cast<int64_t>(number));
      EXPECT_EQ(taken.calls[i].label, "call " + std::to_string(number));
    }
  }
}

TEST(FlightRecorder, NeedsRoom) { EXPECT_THROWS_WITH(FlightRecorder(0), "needs room for a call"); }

TEST(FlightRecorder, FollowsACallToItsEnd) {
  FlightRecorder recorder(8);
  recorder.add_group(group_of({0, 1}));
  const auto only = [&] { return recorder.snapshot().calls.at(0); };
  const auto number = issue(recorder, "x");
  EXPECT_EQ(only().state, State::kIssued);
  EXPECT_EQ(only().awaited, 0);
  recorder.await(number);
  EXPECT_EQ(only().state, State::kAwaited);
  EXPECT_GE(only().awaited, only().issued);
  EXPECT_EQ(only().ended, 0);
  recorder.end(number);
  const auto ended = only();
  EXPECT_EQ(ended.state, State::kDone);
  EXPECT_GE(ended.ended, ended.awaited);
  recorder.await(number);
  recorder.end(number); // another thread that waited
  EXPECT_EQ(only().ended, ended.ended);
  recorder.fail(number, "one that was seen complete may have failed");
  recorder.end(number);
  EXPECT_EQ(only().state, State::kFailed);
  EXPECT_EQ(only().failure, "one that was seen complete may have failed");
}

TEST(FlightRecorder, ChangesNoCallThatTookThePlaceOfAnother) {
  FlightRecorder recorder(2);
  recorder.add_group(group_of({0, 1}));
  const auto lost = issue(recorder, "lost");
  issue(recorder, "a");
  issue(recorder, "b");
  recorder.await(lost);
  recorder.end(lost);
  recorder.fail(lost, "failed");
  recorder.refuse(lost, "refused");
  recorder.end(100); // of none
  for (const auto& call : recorder.snapshot().calls) {
    EXPECT_EQ(call.state, State::kIssued) << call.label;
    EXPECT_EQ(call.failure, "");
  }
}

TEST(FlightRecorder, NumbersCollectivesAndTheMessagesOfEachDirection) {
  FlightRecorder recorder(20);
  recorder.add_group(group_of({4, 5, 6}, 1));
  recorder.end(recorder.connect(0));
  issue(recorder, "a");
  issue(recorder, "b", CollectiveKind::kSend, 0);
  issue(recorder, "c", CollectiveKind::kReceive, 0);
  issue(recorder, "d", CollectiveKind::kSend, 2);
  issue(recorder, "e", CollectiveKind::kSend, 0);
  issue(recorder, "f", CollectiveKind::kBroadcast, 0);
  std::vector<int64_t> sequences;
  for (const auto& call : recorder.snapshot().calls) sequences.push_back(call.sequence);
  EXPECT_THAT(sequences, ElementsAre(-1, 0, 0, 0, 0, 1, 1));
}

TEST(FlightRecorder, KnowsAGroupThatIsMadeAgain) {
  FlightRecorder recorder(20);
  EXPECT_EQ(recorder.add_group(group_of({0, 1})), 0);
  EXPECT_EQ(recorder.add_group(group_of({1, 0})), 1);
  EXPECT_EQ(recorder.add_group(group_of({0, 1})), 0);
  EXPECT_EQ(recorder.snapshot().groups.size(), 2);
}

TEST(FlightRecorder, GivesTheNumberOfARefusedCallToTheNext) {
  FlightRecorder recorder(20);
  recorder.add_group(group_of({0, 1}));
  issue(recorder, "a");
  recorder.refuse(issue(recorder, "refused"), "no tensor");
  issue(recorder, "b");
  const auto calls = recorder.snapshot().calls;
  EXPECT_EQ(calls[1].sequence, -1);
  EXPECT_EQ(calls[1].state, State::kRefused);
  EXPECT_EQ(calls[1].failure, "no tensor");
  EXPECT_EQ(calls[2].sequence, 1);
  EXPECT_EQ(recorder.snapshot().groups[0].issued, 2);
}

TEST(FlightRecorder, TakesCallsOfManyThreadsWhileItIsRead) {
  constexpr int kThreads = 4, kCalls = 3000;
  FlightRecorder recorder(100);
  for (int i = 0; i < kThreads; ++i) recorder.add_group(group_of({0, 1 + i}));
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      for (int call = 0; call < kCalls; ++call) {
        const auto label = std::to_string(i) + " calls " + std::string(static_cast<size_t>(call % 40), 'x');
        const auto number = recorder.issue({.group = i, .kind = CollectiveKind::kAllGather, .label = label, .bytes = call});
        recorder.await(number);
        recorder.end(number);
      }
      --running;
    });
  bool last = false;
  do {
    last = running == 0;
    const auto taken = recorder.snapshot();
    for (size_t i = 0; i < taken.calls.size(); ++i) {
      const auto& call = taken.calls[i];
      ASSERT_EQ(call.number, taken.issued - taken.calls.size() + i);
      ASSERT_EQ(call.sequence, call.bytes);
      ASSERT_EQ(call.label, std::to_string(call.group) + " calls " + std::string(static_cast<size_t>(call.bytes % 40), 'x'));
      if (last) ASSERT_EQ(call.state, State::kDone);
    }
  } while (!last);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(recorder.snapshot().issued, kThreads * kCalls);
}

TEST(FlightRecorder, RecordsNothingInAForkedChild) {
  FlightRecorder recorder(4);
  recorder.add_group(group_of({0, 1}));
  const auto number = issue(recorder, "before");
  const pid_t child = fork();
  if (child == 0) {
    recorder.end(issue(recorder, "in the child"));
    recorder.fail(number, "in the child");
    _exit(recorder.snapshot().calls.empty() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(recorder.snapshot().calls.at(0).state, State::kIssued);
}

TEST(TickClock, GivesTheDateOfAReadingWhateverTheLengthOfATick) {
  const Moment first{.ticks = 1000, .steady = 50, .since_epoch = 7'000'000},
      last{.ticks = 5000, .steady = 2050, .since_epoch = 9'002'000};
  EXPECT_EQ(since_epoch(5000, first, last), 9'002'000);
  EXPECT_EQ(since_epoch(3000, first, last), 9'001'000); // the date was set between them
  EXPECT_EQ(since_epoch(1000, first, last), 9'000'000);
  EXPECT_EQ(since_epoch(1000, first, first), 7'000'000);
  const auto before = Moment::now();
  const auto ticks = now_in_ticks();
  const auto after = Moment::now();
  EXPECT_LE(before.ticks, ticks);
  EXPECT_LE(before.steady, after.steady);
  EXPECT_LE(since_epoch(ticks, before, after), after.since_epoch);
}

// ---------------------------------------------------------------- the file

TEST(TraceFile, SaysWhatWasRecorded) {
  FlightRecorder recorder(20);
  recorder.add_group(group_of({4, 5, 6}, 1));
  recorder.connect(0);
  const auto first = issue(recorder, "no UTF-8: \xff\n");
  recorder.await(first);
  recorder.fail(first, "lost");
  issue(recorder, "to the last", CollectiveKind::kSend, 2);
  const auto json =
      nlohmann::json::parse(to_json({.job = "j", .rank = 5, .world_size = 7, .host = "h"}, recorder.snapshot(), 20, "why"));
  EXPECT_EQ(json["job"], "j");
  EXPECT_EQ(json["rank"], 5);
  EXPECT_EQ(json["world_size"], 7);
  EXPECT_EQ(json["reason"], "why");
  EXPECT_EQ(json["groups"][0]["ranks"], (std::vector<int64_t>{4, 5, 6}));
  const auto& calls = json["calls"];
  ASSERT_EQ(calls.size(), 3);
  EXPECT_EQ(calls[0]["what"], "connect");
  EXPECT_EQ(calls[0]["state"], "awaited");
  EXPECT_FALSE(calls[0].contains("sequence"));
  EXPECT_EQ(calls[1]["what"], "all_reduce");
  EXPECT_EQ(calls[1]["state"], "failed");
  EXPECT_EQ(calls[1]["failure"], "lost");
  EXPECT_EQ(calls[1]["bytes"], 64);
  EXPECT_EQ(calls[1]["dtype"], "Float");
  EXPECT_EQ(calls[1]["op"], "sum");
  EXPECT_LE(calls[1]["issued_ns"].get<int64_t>(), json["written_ns"].get<int64_t>());
  EXPECT_LE(calls[1]["awaited_ns"].get<int64_t>(), calls[1]["ended_ns"].get<int64_t>());
  EXPECT_EQ(calls[2]["peer"], 6);
  EXPECT_TRUE(calls[2]["ended_ns"].is_null());
}

TEST(TraceFile, IsReplacedAsAWholeAndForItsOwnerAlone) {
  const testing::TemporaryFolder folder;
  const auto made = folder.file("made/of/three");
  write_trace_file(made, 3, "first");
  write_trace_file(made, 3, "second");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(made)) names.push_back(entry.path().filename());
  EXPECT_THAT(names, ElementsAre("rank-3.json"));
  EXPECT_EQ(testing::read_text(made + "/rank-3.json"), "second");
  struct stat status = {};
  ASSERT_EQ(stat((made + "/rank-3.json").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600);
}

TEST(TraceFile, NamesWhatCannotBeWritten) {
  const testing::TemporaryFolder folder;
  const auto file = folder.write("file", "");
  EXPECT_THROWS_WITH(write_trace_file(file, 0, "x"), "cannot write the trace " + file + "/rank-0.json: Not a directory");
  EXPECT_THROWS_WITH(write_trace_file("/proc/no/folder", 1, "x"), "cannot write the trace /proc/no/folder/rank-1.json: ");
  std::filesystem::create_directory(folder.file("rank-2.json")); // which no file replaces
  EXPECT_THROWS_WITH(write_trace_file(folder.path(), 2, "x"), "rank-2.json: Is a directory");
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{100, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto error = testing::error_of([&] { write_trace_file(folder.path(), 4, std::string(101, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(error, HasSubstr("rank-4.json: it has 101 bytes, and a file may have 100 here (ulimit -f)"));
}

TEST(TraceOptions, ComeFromTheEnvironment) {
  EXPECT_EQ(trace_options({}).calls, 1000);
  EXPECT_EQ(trace_options({}).folder, "");
  EXPECT_EQ(trace_options({{"TESSERA_TRACE_CALLS", ""}}).calls, 1000);
  EXPECT_EQ(trace_options({{"TESSERA_TRACE_CALLS", "0"}}).calls, 0);
  EXPECT_EQ(trace_options({{"TESSERA_TRACE_CALLS", "7"}, {"TESSERA_TRACE_FOLDER", "x"}}).folder, "x");
  for (const std::string bad : {"-1", "many", "7x", "1000001", "99999999999"})
    EXPECT_THROWS_WITH(trace_options({{"TESSERA_TRACE_CALLS", bad}}),
                       "environment variable TESSERA_TRACE_CALLS=" + bad + " must be a number from 0 to 1000000");
}

} // namespace
} // namespace tessera::internal::flight_recorder_test
