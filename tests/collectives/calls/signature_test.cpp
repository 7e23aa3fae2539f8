// Ranks that call different collectives: every one of them gets an error that lists all calls.
#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/calls/signature.h>
#include <tessera/collectives/process_context.h>
#include <torch/torch.h>

#include <numeric>

namespace tessera::signature_test {
namespace {

// A fresh group for each mismatch: a group that failed cannot be used again.
CommunicatorPtr fresh_group() {
  static int count = 0;
  auto& context = process_context();
  std::vector<int64_t> ranks(context.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return context.communicator(ranks, at::kCPU, c10::str("signature ", count++));
}

bool is_last(const Communicator& group) { return group.rank() == group.size() - 1; }

TEST(Signature, TextNamesWhatIsCalled) {
  auto signature = internal::make_signature(CollectiveKind::kAllGather, "blocks.0", at::kFloat, 4096);
  signature.sequence = 12;
  EXPECT_EQ(signature.to_string(), "all_gather 'blocks.0' (4096 bytes of Float, call 12)");
  EXPECT_EQ(internal::make_signature(CollectiveKind::kBarrier, "end", at::kByte, 0).to_string(), "barrier 'end' (call 0)");
  EXPECT_EQ(internal::make_signature(CollectiveKind::kReduceScatter, "g", at::kBFloat16, 8).to_string(),
            "reduce_scatter 'g' (8 bytes of BFloat16, sum, call 0)");
}

TEST(Signature, LongLabelsAreCutInTextButComparedWhole) {
  const std::string stem(200, 'x');
  const auto a = internal::make_signature(CollectiveKind::kAllGather, stem + "a", at::kFloat, 4);
  const auto b = internal::make_signature(CollectiveKind::kAllGather, stem + "b", at::kFloat, 4);
  EXPECT_EQ(a.label_text(), stem.substr(0, internal::Signature::kLabelCapacity));
  EXPECT_FALSE(a.same_collective(b));
  EXPECT_TRUE(a.same_collective(a));
}

void expect_mismatch(const std::function<void(Communicator&, bool)>& call, const std::string& usual, const std::string& odd) {
  auto group = fresh_group();
  if (group->size() == 1) return;
  const auto expected_first = c10::str("rank 0: ", usual), expected_last = c10::str("rank ", group->size() - 1, ": ", odd);
  std::string text;
  try {
    call(*group, is_last(*group));
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_NE(text.find("the ranks of the group called different collectives:"), std::string::npos) << text;
  EXPECT_NE(text.find(expected_first), std::string::npos) << text << "\nexpected: " << expected_first;
  EXPECT_NE(text.find(expected_last), std::string::npos) << text << "\nexpected: " << expected_last;
  EXPECT_THROWS_WITH(group->barrier("after"), "the group cannot be used after an earlier failure: ");
}

TEST(Signature, DifferentSizes) {
  for (const int64_t numel : {1, 100, 30000, 3000000}) { // inline and long payloads
    expect_mismatch(
        [&](Communicator& group, bool odd) {
          const auto each = odd ? numel + 1 : numel;
          auto output = torch::zeros({each * group.size()});
          group.all_gather_into(output, torch::ones({each}), "p").wait();
        },
        c10::str("all_gather 'p' (", 4 * numel * process_context().world_size(), " bytes of Float"),
        c10::str("all_gather 'p' (", 4 * (numel + 1) * process_context().world_size(), " bytes of Float"));
  }
}

TEST(Signature, SmallAgainstLarge) {
  expect_mismatch(
      [](Communicator& group, bool odd) { group.all_reduce(torch::ones({odd ? 10000000 : 4}), ReduceOp::kSum, "p").wait(); },
      "all_reduce 'p' (16 bytes of Float, sum, call 0)", "all_reduce 'p' (40000000 bytes of Float, sum, call 0)");
}

TEST(Signature, DifferentLabels) {
  expect_mismatch([](Communicator& group,
                     bool odd) { group.all_reduce(torch::ones({4}), ReduceOp::kSum, odd ? "blocks.1" : "blocks.0").wait(); },
                  "all_reduce 'blocks.0' (16 bytes of Float, sum, call 0)",
                  "all_reduce 'blocks.1' (16 bytes of Float, sum, call 0)");
}

TEST(Signature, DifferentDtypesAndOperationsAndRoots) {
  expect_mismatch(
      [](Communicator& group, bool odd) {
        group.all_reduce(odd ? torch::ones({4}, torch::kInt) : torch::ones({4}), ReduceOp::kSum, "p").wait();
      },
      "all_reduce 'p' (16 bytes of Float", "all_reduce 'p' (16 bytes of Int");
  expect_mismatch([](Communicator& group,
                     bool odd) { group.all_reduce(torch::ones({4}), odd ? ReduceOp::kMax : ReduceOp::kSum, "p").wait(); },
                  "all_reduce 'p' (16 bytes of Float, sum", "all_reduce 'p' (16 bytes of Float, max");
  expect_mismatch([](Communicator& group, bool odd) { group.broadcast(torch::ones({4}), odd ? 1 : 0, "p").wait(); },
                  "broadcast 'p' (16 bytes of Float, root 0", "broadcast 'p' (16 bytes of Float, root 1");
  expect_mismatch(
      [](Communicator& group, bool odd) {
        if (odd)
          group.barrier("end of step");
        else
          group.all_reduce(torch::ones({4}), ReduceOp::kSum, "p").wait();
      },
      "all_reduce 'p' (16 bytes of Float, sum, call 0)", "barrier 'end of step' (call 0)");
}

TEST(Signature, OneCallTooMany) {
  expect_mismatch(
      [](Communicator& group, bool odd) {
        auto tensor = torch::ones({4}), extra = torch::ones({4});
        Work work;
        if (odd) work = group.all_reduce(extra, ReduceOp::kSum, "extra");
        auto last = group.all_reduce(tensor, ReduceOp::kSum, "p");
        if (odd) work.wait();
        last.wait();
      },
      "all_reduce 'p' (16 bytes of Float, sum, call 0)", "all_reduce 'extra' (16 bytes of Float, sum, call 0)");
}

TEST(Signature, MessagesThatDoNotFitAreAnErrorOnBothRanks) {
  for (const int64_t numel : {3, 300000}) {
    auto group = fresh_group();
    const int last = group->size() - 1;
    if (last == 0) return;
    auto tensor = torch::ones({numel}), longer = torch::ones({numel + 1});
    const auto expected =
        c10::str("the ranks of the group called different collectives:\n  rank 0: send 'm' (", 4 * numel,
                 " bytes of Float, call 0)\n  rank ", last, ": receive 'm' (", 4 * numel + 4, " bytes of Float");
    if (group->rank() == 0) EXPECT_THROWS_WITH(group->send(tensor, last, "m").wait(), expected);
    if (group->rank() == last) EXPECT_THROWS_WITH(group->receive(longer, 0, "m").wait(), expected);
  }
}

TEST(Signature, AllToAllSplitsThatDoNotFitAreAnErrorOnEveryRank) {
  const int n = process_context().world_size(), last = n - 1;
  if (n == 1) return;
  for (const int64_t each : {0, 2, 30000}) { // inline and long payloads
    for (const int to : {0, last}) {         // to another rank and to itself
      auto group = fresh_group();
      std::vector<int64_t> sends(n, each), receives(n, each);
      if (is_last(*group)) ++sends[to];
      const auto sum = std::accumulate(sends.begin(), sends.end(), int64_t{0});
      auto input = torch::ones({sum}), output = torch::zeros({n * each});
      EXPECT_THROWS_WITH(
          group->all_to_all(output, input, receives, sends, "tokens").wait(),
          c10::str("rank ", last, " sends ", 4 * (each + 1), " bytes to rank ", to, ", which expects ", 4 * each, " from it"));
      EXPECT_THROWS_WITH(group->barrier("after"), "the group cannot be used after an earlier failure: ");
    }
  }
}

} // namespace
} // namespace tessera::signature_test
