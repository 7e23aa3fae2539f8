// What the communicators of a job leave in the record of each rank.
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tessera/collectives/process_context.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <unistd.h>
#include <numeric>
#include <thread>

namespace tessera::recording_communicator_test {
namespace {

using nlohmann::json;

CommunicatorPtr make_group(const std::string& purpose) {
  std::vector<int64_t> ranks(static_cast<size_t>(process_context().world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return process_context().communicator(ranks, at::kCPU, purpose);
}

json written_record() {
  const testing::TemporaryFolder folder;
  write_trace(folder.path());
  return json::parse(testing::read_text(folder.file(c10::str("rank-", process_context().rank(), ".json"))));
}

/// The calls of a group, the oldest first.
std::vector<json> calls_of(const Communicator& group) {
  const auto record = written_record();
  std::vector<json> calls;
  for (const auto& call : record.at("calls"))
    if (record.at("groups").at(call.at("group").get<size_t>()).at("name") == group.name()) calls.push_back(call);
  return calls;
}

std::string outline(const json& call) {
  const auto text = [&](const char* name) { return call.contains(name) ? " " + call.at(name).dump() : ""; };
  return call.at("what").get<std::string>() + text("sequence") + text("label") + text("bytes") + text("dtype") + text("op") +
         text("peer") + " " + call.at("state").get<std::string>();
}

std::vector<std::string> outlines(const std::vector<json>& calls) {
  std::vector<std::string> texts;
  for (const auto& call : calls) texts.push_back(outline(call));
  return texts;
}

bool is_alone() { return process_context().world_size() == 1; }

TEST(RecordingCommunicator, RecordsEveryKindOfCollective) {
  if (is_alone()) return;
  const auto group = make_group("every kind");
  const int n = group->size();
  const auto part = torch::ones({4}), whole = torch::ones({4 * n}), longs = torch::ones({2 * n}, torch::kLong);
  group->all_gather_into(whole, part, "a").wait();
  group->reduce_scatter(part, whole, ReduceOp::kAvg, "b").wait();
  group->all_reduce(longs, ReduceOp::kMax, "c").wait();
  group->all_to_all(torch::ones({n}), torch::ones({n}), {}, {}, "d").wait();
  group->broadcast(part, n - 1, "e").wait();
  group->barrier("f");
  const auto bytes = [](int64_t count) { return std::to_string(count); };
  const std::string op_less = " \"Float\"";
  EXPECT_EQ(outlines(calls_of(*group)),
            (std::vector<std::string>{"connect done", "all_gather 0 \"a\" " + bytes(16 * n) + op_less + " done",
                                      "reduce_scatter 1 \"b\" " + bytes(16 * n) + op_less + " \"avg\" done",
                                      "all_reduce 2 \"c\" " + bytes(16 * n) + " \"Long\" \"max\" done",
                                      "all_to_all 3 \"d\" " + bytes(4 * n) + op_less + " done",
                                      "broadcast 4 \"e\" 16" + op_less + " " + std::to_string(n - 1) + " done",
                                      "barrier 5 \"f\" done"}));
  for (const auto& call : calls_of(*group)) {
    EXPECT_LE(call["issued_ns"].get<int64_t>(), call["awaited_ns"].get<int64_t>());
    EXPECT_LE(call["awaited_ns"].get<int64_t>(), call["ended_ns"].get<int64_t>());
    EXPECT_GT(call["thread"].get<int64_t>(), 0);
  }
  EXPECT_EQ(group->counters().get(CollectiveKind::kAllGather).calls, 1);
  EXPECT_EQ(group->counters().get(CollectiveKind::kAllGather).bytes, 16 * n);
}

TEST(RecordingCommunicator, RecordsMessagesByDirection) {
  if (is_alone()) return;
  const auto group = make_group("messages");
  const auto there = torch::ones({2}), back = torch::ones({3});
  if (group->rank() == 0) {
    group->send(there, 1, "there").wait();
    group->receive(back, 1, "back").wait();
    group->send(there, 1, "again").wait();
    EXPECT_EQ(outlines(calls_of(*group)),
              (std::vector<std::string>{"connect done", "send 0 \"there\" 8 \"Float\" 1 done",
                                        "receive 0 \"back\" 12 \"Float\" 1 done", "send 1 \"again\" 8 \"Float\" 1 done"}));
  } else if (group->rank() == 1) {
    group->receive(there, 0, "there").wait();
    group->send(back, 0, "back").wait();
    group->receive(there, 0, "again").wait();
    EXPECT_EQ(outlines(calls_of(*group)),
              (std::vector<std::string>{"connect done", "receive 0 \"there\" 8 \"Float\" 0 done",
                                        "send 0 \"back\" 12 \"Float\" 0 done", "receive 1 \"again\" 8 \"Float\" 0 done"}));
  }
}

TEST(RecordingCommunicator, SaysWhichCallsNobodyHasWaitedFor) {
  if (is_alone()) return;
  const auto group = make_group("unawaited");
  const auto a = torch::ones({4}), b = torch::ones({4}), c = torch::ones({4});
  auto first = group->all_reduce(a, ReduceOp::kSum, "waited for");
  auto second = group->all_reduce(b, ReduceOp::kSum, "polled");
  auto third = group->all_reduce(c, ReduceOp::kSum, "neither");
  first.wait();
  while (!second.is_completed()) std::this_thread::yield();
  const auto calls = calls_of(*group);
  EXPECT_EQ(calls.at(1)["state"], "done");
  EXPECT_FALSE(calls.at(1)["awaited_ns"].is_null());
  EXPECT_EQ(calls.at(2)["state"], "done");
  EXPECT_TRUE(calls.at(2)["awaited_ns"].is_null());
  EXPECT_EQ(calls.at(3)["state"], "issued");
  third.wait();
  EXPECT_EQ(calls_of(*group).at(3)["state"], "done");
}

TEST(RecordingCommunicator, EndsCoalescedCallsTogether) {
  if (is_alone()) return;
  const auto group = make_group("coalesced");
  const auto a = torch::ones({4}), b = torch::ones({8});
  auto work = group->coalesced([&] {
    group->all_reduce(a, ReduceOp::kSum, "a");
    group->all_reduce(b, ReduceOp::kSum, "b");
  });
  EXPECT_EQ(outlines(calls_of(*group)),
            (std::vector<std::string>{"connect done", "all_reduce 0 \"a\" 16 \"Float\" \"sum\" issued",
                                      "all_reduce 1 \"b\" 32 \"Float\" \"sum\" issued"}));
  work.wait();
  EXPECT_TENSORS_EQUAL(b, torch::full({8}, group->size(), torch::kFloat));
  EXPECT_EQ(calls_of(*group).at(1)["state"], "done");
  EXPECT_EQ(calls_of(*group).at(2)["state"], "done");
  group->coalesced([] {}).wait();
  auto third = group->all_reduce(a, ReduceOp::kSum, "after");
  EXPECT_EQ(calls_of(*group).at(3)["state"], "issued");
  third.wait();
}

TEST(RecordingCommunicator, RecordsACallThatIsRefusedAndGoesOn) {
  if (is_alone()) return;
  const auto group = make_group("refused");
  EXPECT_THROWS_WITH(group->broadcast(torch::ones({4}), 99, "bad root"), "99");
  auto tensor = torch::ones({4});
  group->all_reduce(tensor, ReduceOp::kSum, "good").wait();
  EXPECT_THROWS_WITH(group->send(tensor, 99, "no receiver"), "99");
  EXPECT_THROWS_WITH(group->receive(tensor, -1, "no sender"), "-1");
  EXPECT_THROWS_WITH(group->all_reduce(at::Tensor(), ReduceOp::kSum, "no tensor"), "tensor is undefined");
  const auto calls = calls_of(*group);
  EXPECT_EQ(calls.size(), 6);
  for (const size_t refused : {1, 3, 4, 5}) EXPECT_EQ(calls.at(refused)["state"], "refused");
  EXPECT_FALSE(calls.at(1).contains("sequence"));
  EXPECT_NE(calls.at(1)["failure"].get<std::string>().find("bad root"), std::string::npos);
  EXPECT_EQ(outline(calls.at(2)), "all_reduce 0 \"good\" 16 \"Float\" \"sum\" done");
}

TEST(RecordingCommunicator, LetsSeveralThreadsWaitForOneCall) {
  if (is_alone()) return;
  const auto group = make_group("threads");
  for (int round = 0; round < 50; ++round) {
    auto tensor = torch::ones({100});
    auto work = group->all_reduce(tensor, ReduceOp::kSum, "shared");
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([work]() mutable { work.wait(); });
    for (auto& thread : threads) thread.join();
    EXPECT_TENSORS_EQUAL(tensor, torch::full({100}, group->size(), torch::kFloat));
  }
  for (const auto& call : calls_of(*group)) EXPECT_EQ(call["state"], "done");
}

TEST(RecordingCommunicator, WritesForAnyWorldAndNamesTheJob) {
  const auto record = written_record();
  EXPECT_EQ(record["format"], "tessera trace");
  EXPECT_EQ(record["rank"], process_context().rank());
  EXPECT_EQ(record["world_size"], process_context().world_size());
  EXPECT_EQ(record["job"].get<std::string>().size(), 16);
  EXPECT_EQ(record["pid"], getpid());
  EXPECT_THROWS_WITH(write_trace(""), "write_trace: the name of the folder is empty");
  EXPECT_THROWS_WITH(write_trace("/proc/none"), "cannot write the trace /proc/none/rank-");
  // The same on all ranks.
  const auto store = process_context().store();
  if (process_context().rank() == 0) store->set("job of rank 0", record["job"].get<std::string>());
  EXPECT_EQ(store->get_to_str("job of rank 0"), record["job"].get<std::string>());
}

TEST(RecordingCommunicator, WritesNothingForAForkedChild) {
  if (is_alone()) return;
  const auto group = make_group("forked");
  const testing::TemporaryFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    const auto error = testing::error_of([&] { write_trace(folder.path()); });
    const auto barrier = testing::error_of([&] { group->barrier("in the child"); });
    _exit(error.find("no process group") != std::string::npos && barrier.find("forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  group->barrier("after the fork");
  EXPECT_EQ(outlines(calls_of(*group)), (std::vector<std::string>{"connect done", "barrier 0 \"after the fork\" done"}));
}

TEST(RecordingCommunicator, HasNoRecordOfAFakeGroup) {
  if (!is_alone()) return;
  destroy_process_group();
  init_fake_process_group(0, 4);
  EXPECT_THROWS_WITH(write_trace("folder"),
                     "write_trace: nothing is recorded with TESSERA_TRACE_CALLS=0, of a fake or simulated process group");
  destroy_process_group();
  EXPECT_THROWS_WITH(write_trace("folder"), "no process group: call tessera::init_process_group() first");
  init_process_group();
}

} // namespace
} // namespace tessera::recording_communicator_test
