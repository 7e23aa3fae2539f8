#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <torch/torch.h>

#include <sched.h>

#include <filesystem>
#include <map>
#include <numeric>

namespace tessera::collectives_test {
namespace {

const std::vector<int64_t> kSizes{0, 1, 2, 3, 7, 1000, 4097, 300001};
const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong,
                                          at::kInt,   at::kShort,  at::kChar,     at::kByte, at::kBool};

CommunicatorPtr world(const std::string& purpose = "default") {
  auto& context = process_context();
  std::vector<int64_t> ranks(context.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return context.communicator(ranks, at::kCPU, purpose);
}

/// The first `numel` elements of `pattern` again and again.
at::Tensor repeated(const at::Tensor& pattern, int64_t numel) {
  return pattern.repeat({numel / pattern.numel() + 1}).narrow(0, 0, numel);
}

int64_t period_of(at::ScalarType dtype) { return dtype == at::kBool ? 2 : 5; }

/// What rank `rank` holds: small integers, exact in every dtype.
at::Tensor values(int64_t numel, int rank, at::ScalarType dtype) {
  const int64_t period = period_of(dtype);
  return repeated((torch::arange(period) + rank).remainder(period).to(dtype), numel);
}

std::vector<at::Tensor> of_all_ranks(int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (int r = 0; r < process_context().world_size(); ++r) tensors.push_back(values(numel, r, dtype));
  return tensors;
}

at::Tensor reduced(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  const auto dtype = tensors[0].scalar_type();
  const auto stacked = torch::stack(tensors).to(dtype == at::kBool ? at::kLong : at::kDouble);
  switch (op) {
    case ReduceOp::kSum: return stacked.sum(0).to(dtype);
    case ReduceOp::kAvg: return stacked.mean(0).to(dtype);
    case ReduceOp::kMin: return stacked.amin(0).to(dtype);
    case ReduceOp::kMax: return stacked.amax(0).to(dtype);
    case ReduceOp::kProduct: return stacked.prod(0).to(dtype);
  }
  return {};
}

/// Of the `values` of all ranks.
at::Tensor reduced_values(int64_t numel, at::ScalarType dtype, ReduceOp op) {
  return repeated(reduced(of_all_ranks(period_of(dtype), dtype), op), numel);
}

TEST(Collectives, AllGatherHoldsEveryRankInOrder) {
  auto group = world();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      SCOPED_TRACE(c10::str(dtype, " ", numel));
      auto output = torch::zeros({group->size() * numel}, dtype);
      group->all_gather_into(output, values(numel, group->rank(), dtype), "gather").wait();
      EXPECT_TENSORS_EQUAL(output, torch::cat(of_all_ranks(numel, dtype)));
    }
  }
}

TEST(GatherTexts, HoldsEveryRankInOrderWhateverTheLengths) {
  auto group = world();
  std::vector<std::string> expected;
  for (int r = 0; r < group->size(); ++r) expected.emplace_back(static_cast<size_t>(r * 1000), 'x'); // rank 0 has none
  const auto& mine = expected[static_cast<size_t>(group->rank())];
  EXPECT_EQ(internal::gather_texts(mine, *group, at::kCPU, "texts"), expected);
  EXPECT_TRUE(internal::gather_texts_that_differ("the same", *group, at::kCPU, "texts").empty());
  if (group->size() == 1) return;
  EXPECT_EQ(internal::gather_texts_that_differ(mine, *group, at::kCPU, "texts"), expected);
}

TEST(GatherTexts, DifferFirstAtALine) {
  EXPECT_EQ(internal::first_difference({"a\nb\n", "a\nb\n", "a\nc\n"}, {3, 5, 7}, "line"), "rank 3 has b, rank 7 has c");
  EXPECT_EQ(internal::first_difference({"a\n", "a\nb\n"}, {0, 1}, "line"), "rank 0 has no further line, rank 1 has b");
  EXPECT_EQ(internal::first_difference({"a", "a"}, {0, 1}, "line"), "");
}

TEST(Collectives, AllGatherInPlace) {
  auto group = world();
  for (const int64_t numel : {1, 5, 5000}) {
    auto output = torch::zeros({group->size() * numel});
    auto input = output.narrow(0, group->rank() * numel, numel);
    input.copy_(values(numel, group->rank(), at::kFloat));
    group->all_gather_into(output, input, "gather").wait();
    EXPECT_TENSORS_EQUAL(output, torch::cat(of_all_ranks(numel, at::kFloat)));
  }
}

void for_all_reductions(const std::function<void(at::ScalarType, int64_t, ReduceOp)>& check) {
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        if (op == ReduceOp::kAvg && !at::isFloatingType(dtype)) continue;
        SCOPED_TRACE(c10::str(dtype, " ", numel, " ", static_cast<int>(op)));
        check(dtype, numel, op);
      }
    }
  }
}

TEST(Collectives, ReduceScatterGivesEachRankItsPart) {
  auto group = world();
  for_all_reductions([&](at::ScalarType dtype, int64_t numel, ReduceOp op) {
    auto output = torch::zeros({numel}, dtype);
    group->reduce_scatter(output, values(group->size() * numel, group->rank(), dtype), op, "reduce").wait();
    const auto all = reduced_values(group->size() * numel, dtype, op);
    EXPECT_TENSORS_EQUAL(output, all.narrow(0, group->rank() * numel, numel));
  });
}

TEST(Collectives, ReduceScatterInPlaceOfArraysThatAreNotViewsOfOneTensor) {
  auto group = world();
  const int n = group->size(), me = group->rank();
  for (const int64_t numel : {1, 5000, 70001}) {
    const auto memory = values(n * numel, me, at::kFloat);
    const auto input = torch::from_blob(memory.data_ptr(), {n * numel});
    auto output = torch::from_blob(memory.data_ptr<float>() + me * numel, {numel});
    group->reduce_scatter(output, input, ReduceOp::kSum, "in place").wait();
    EXPECT_TENSORS_EQUAL(output, reduced_values(n * numel, at::kFloat, ReduceOp::kSum).narrow(0, me * numel, numel));
  }
}

TEST(Collectives, AllReduceIsTheSameEverywhere) {
  auto group = world();
  for_all_reductions([&](at::ScalarType dtype, int64_t numel, ReduceOp op) {
    auto tensor = values(numel, group->rank(), dtype);
    group->all_reduce(tensor, op, "reduce").wait();
    EXPECT_TENSORS_EQUAL(tensor, reduced_values(numel, dtype, op));
  });
}

TEST(Collectives, ALongAllReduceInSegments) {
  auto group = world();
  const int64_t numel = (9 << 20) + 1; // 36 MiB
  group->counters().reset();
  auto tensor = values(numel, group->rank(), at::kFloat);
  group->all_reduce(tensor, ReduceOp::kSum, "long").wait();
  EXPECT_TENSORS_EQUAL(tensor, reduced_values(numel, at::kFloat, ReduceOp::kSum));
  const int64_t calls = group->size() > 1 ? 1 : 0;
  EXPECT_EQ(group->counters().get(CollectiveKind::kAllReduce), (CollectiveCounters::Count{calls, calls * numel * 4}));
}

TEST(Collectives, LowPrecisionSumsAreRoundedOnce) {
  auto group = world();
  // 256 + 1 is 256 in bf16: a sum in bf16 would never leave 256.
  auto tensor = torch::full({1000}, group->rank() == 0 ? 256.0 : 1.0, torch::kBFloat16);
  group->all_reduce(tensor, ReduceOp::kSum, "reduce").wait();
  EXPECT_TENSORS_EQUAL(tensor, torch::full({1000}, 255.0 + group->size(), torch::kFloat).to(torch::kBFloat16));
}

TEST(Collectives, ANanOnAnyRankSurvivesMinAndMax) {
  auto group = world();
  for (const auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (int where = 0; where < group->size(); ++where) {
      auto tensor = torch::full({3}, group->rank() == where ? NAN : 1.0f);
      group->all_reduce(tensor, op, "nan").wait();
      EXPECT_TRUE(tensor.isnan().all().item<bool>());
    }
  }
}

TEST(Collectives, AllToAllEqualAndUneven) {
  auto group = world();
  const int n = group->size(), me = group->rank();
  for (const int64_t each : {0, 1, 3, 5000}) {
    auto input = torch::arange(n * each) + 100000 * me, output = torch::zeros({n * each}, torch::kLong);
    group->all_to_all(output, input, {}, {}, "equal").wait();
    for (int r = 0; r < n; ++r)
      EXPECT_TENSORS_EQUAL(output.narrow(0, r * each, each), torch::arange(me * each, (me + 1) * each) + 100000 * r);
  }
  // Rank s sends (s + r) % 3 × 1000 elements of value s to rank r.
  const auto count = [](int s, int r) { return int64_t{(s + r) % 3} * 1000; };
  std::vector<int64_t> input_splits, output_splits;
  std::vector<at::Tensor> expected;
  for (int r = 0; r < n; ++r) {
    input_splits.push_back(count(me, r));
    output_splits.push_back(count(r, me));
    expected.push_back(torch::full({count(r, me)}, r, torch::kLong));
  }
  auto input = torch::full({std::accumulate(input_splits.begin(), input_splits.end(), int64_t{0})}, me, torch::kLong);
  auto output = torch::zeros({std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0})}, torch::kLong);
  group->all_to_all(output, input, output_splits, input_splits, "uneven").wait();
  EXPECT_TENSORS_EQUAL(output, torch::cat(expected));
}

TEST(Collectives, BroadcastFromEveryRoot) {
  auto group = world();
  for (const auto dtype : kDtypes) {
    for (const auto numel : kSizes) {
      for (int root = 0; root < group->size(); ++root) {
        auto tensor = values(numel, group->rank(), dtype);
        group->broadcast(tensor, root, "broadcast").wait();
        EXPECT_TENSORS_EQUAL(tensor, values(numel, root, dtype));
      }
    }
  }
}

TEST(Collectives, ManyInFlightWaitedForInAnyOrder) {
  auto group = world();
  const int n = group->size(), me = group->rank();
  std::vector<at::Tensor> gathered, sums;
  std::vector<Work> gathers, reductions;
  for (int i = 0; i < 20; ++i) {
    const int64_t numel = i % 3 == 0 ? 10 : 40000;
    gathered.push_back(torch::zeros({n * numel}));
    gathers.push_back(group->all_gather_into(gathered.back(), torch::full({numel}, 10.0 * i + me), "gather"));
    sums.push_back(torch::full({numel}, i + me, torch::kFloat));
    reductions.push_back(group->all_reduce(sums.back(), ReduceOp::kSum, "sum"));
  }
  for (int i = 19; i >= 0; --i) {
    // Ranks wait in different orders.
    (me % 2 ? gathers : reductions)[i].wait();
    (me % 2 ? reductions : gathers)[i].wait();
    EXPECT_TENSORS_EQUAL(sums[i], torch::full_like(sums[i], n * i + n * (n - 1) / 2));
    for (int r = 0; r < n; ++r) EXPECT_EQ(gathered[i][r * (gathered[i].numel() / n)].item<float>(), 10.0f * i + r);
  }
}

// A tensor in memory that the group's `allocate` made.
at::Tensor allocated(Communicator& group, const at::Tensor& values) {
  auto memory = group.allocate(static_cast<int64_t>(std::max<size_t>(1, values.nbytes())));
  void* const data = memory.get();
  const auto owner = std::make_shared<c10::DataPtr>(std::move(memory));
  auto tensor = torch::from_blob(
      data, values.sizes(), [owner](void*) {}, values.options());
  return tensor.copy_(values);
}

TEST(Collectives, OnMemoryOfTheGroup) {
  auto group = world();
  const int n = group->size(), me = group->rank();
  for (const int64_t numel : {1, 5000, 70001, 600000}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kChar}) {
      auto output = allocated(*group, torch::zeros({n * numel}, dtype));
      auto own = output.narrow(0, me * numel, numel).copy_(values(numel, me, dtype));
      group->all_gather_into(output, own, "in place").wait();
      EXPECT_TENSORS_EQUAL(output, torch::cat(of_all_ranks(numel, dtype)));
      for (const bool everywhere : {true, false}) { // and on some of the ranks alone
        output = torch::zeros({n * numel}, dtype);
        if (everywhere || me % 2 == 0) output = allocated(*group, output);
        group->all_gather_into(output, values(numel, me, dtype), "from elsewhere").wait();
        EXPECT_TENSORS_EQUAL(output, torch::cat(of_all_ranks(numel, dtype)));
      }
      const auto all = of_all_ranks(n * numel, dtype);
      auto part = torch::zeros({numel}, dtype);
      group->reduce_scatter(part, allocated(*group, all[me]), ReduceOp::kSum, "sum").wait();
      EXPECT_TENSORS_EQUAL(part, reduced_values(n * numel, dtype, ReduceOp::kSum).narrow(0, me * numel, numel));
      auto tensor = allocated(*group, all[me]);
      group->all_reduce(tensor, ReduceOp::kMax, "max").wait();
      EXPECT_TENSORS_EQUAL(tensor, reduced_values(n * numel, dtype, ReduceOp::kMax));
      auto swapped = torch::zeros({n * numel}, dtype);
      group->all_to_all(swapped, allocated(*group, all[me]), {}, {}, "swap").wait();
      for (int r = 0; r < n; ++r) EXPECT_TENSORS_EQUAL(swapped.narrow(0, r * numel, numel), all[r].narrow(0, me * numel, numel));
      auto sent = allocated(*group, values(numel, me, dtype)); // on the root alone
      if (me > 0) sent = torch::zeros({numel}, dtype);
      group->broadcast(sent, 0, "broadcast").wait();
      EXPECT_TENSORS_EQUAL(sent, values(numel, 0, dtype));
    }
  }
}

TEST(Collectives, ADroppedWorkStillCompletes) {
  auto group = world();
  auto tensor = torch::ones({50000});
  { auto dropped = group->all_reduce(tensor, ReduceOp::kSum, "dropped"); }
  group->barrier("after");
  auto again = torch::ones({50000});
  group->all_reduce(again, ReduceOp::kSum, "again").wait();
  EXPECT_TENSORS_EQUAL(again, torch::full({50000}, group->size(), torch::kFloat));
}

TEST(Collectives, IsCompletedBecomesTrueWithoutAWait) {
  auto group = world();
  auto tensor = torch::ones({100});
  auto work = group->all_reduce(tensor, ReduceOp::kSum, "polled");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!work.is_completed() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(work.is_completed());
  EXPECT_TENSORS_EQUAL(tensor, torch::full({100}, group->size(), torch::kFloat));
  EXPECT_TRUE(Work().is_completed());
}

/// One that is polled before its sender comes, while the sender waits for a collective of several rounds.
TEST(Collectives, APolledMessageKeepsNoCollectiveBack) {
  auto group = world();
  if (group->size() == 1) return;
  const int last = group->size() - 1;
  auto message = torch::zeros({3}), large = torch::ones({2 << 20});
  Work received;
  if (group->rank() == 0) {
    received = group->receive(message, last, "message");
    EXPECT_FALSE(received.is_completed());
  }
  auto work = group->all_reduce(large, ReduceOp::kSum, "large");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!work.is_completed() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(work.is_completed());
  work.wait();
  EXPECT_TENSORS_EQUAL(large, torch::full({2 << 20}, group->size(), torch::kFloat));
  if (group->rank() == last) group->send(torch::ones({3}), 0, "message").wait();
  if (group->rank() != 0) return;
  received.wait();
  EXPECT_TENSORS_EQUAL(message, torch::ones({3}));
}

TEST(Collectives, PurposesAreIndependent) {
  auto first = world("first"), second = world("second");
  EXPECT_EQ(first, world("first"));
  EXPECT_NE(first, second);
  auto a = torch::ones({10}), b = torch::ones({10});
  // Different ranks start them in a different order.
  const bool swap = process_context().rank() % 2;
  auto one = (swap ? second : first)->all_reduce(swap ? b : a, ReduceOp::kSum, swap ? "b" : "a");
  auto two = (swap ? first : second)->all_reduce(swap ? a : b, ReduceOp::kSum, swap ? "a" : "b");
  one.wait();
  two.wait();
  EXPECT_TENSORS_EQUAL(a, torch::full({10}, first->size(), torch::kFloat));
  EXPECT_TENSORS_EQUAL(b, a);
}

TEST(Collectives, ARankThatLeavesAGroupMayBeInAnother) {
  const auto& context = process_context();
  if (context.world_size() == 1) return;
  for (int leaver = 0; leaver < 2; ++leaver) {
    const auto group = world(c10::str("that rank ", leaver, " leaves"));
    group->barrier("together");
    if (context.rank() == leaver) {
      group->close();
      EXPECT_THROWS_WITH(group->barrier("alone"), "the process group was destroyed");
    } else {
      EXPECT_THROWS_WITH(group->all_reduce(torch::ones({4}), ReduceOp::kSum, "p").wait(),
                         c10::str("rank ", leaver, ", which has left the group"));
    }
    const auto ones = torch::ones({4});
    world(c10::str("after rank ", leaver))->all_reduce(ones, ReduceOp::kSum, "p").wait();
    EXPECT_TRUE(torch::equal(ones, torch::full({4}, context.world_size(), torch::kFloat)));
  }
}

/// Whom it missed in another group before is not taken for the cause.
TEST(Collectives, ARankMayLeaveOneGroupAfterAnother) {
  auto& context = process_context();
  if (context.world_size() < 3) return;
  const auto all = world("that rank 0 leaves first");
  const auto pair =
      context.rank() == 1 || context.rank() == 2 ? context.communicator({1, 2}, at::kCPU, "that rank 1 leaves") : nullptr;
  const auto miss = [](const CommunicatorPtr& group, int leaver) {
    EXPECT_THROWS_WITH(group->all_reduce(torch::ones({4}), ReduceOp::kSum, "p").wait(),
                       c10::str("rank ", leaver, ", which has left the group"));
  };
  if (context.rank() == 0)
    all->close();
  else
    miss(all, 0);
  if (context.rank() == 1) pair->close();
  if (context.rank() == 2) miss(pair, 1);
  world("after both")->barrier("together");
}

TEST(Collectives, MessagesBetweenTwoRanksComeInOrder) {
  auto group = world();
  const int n = group->size(), me = group->rank();
  if (n == 1) {
    EXPECT_THROWS_WITH(group->send(torch::ones({1}), 0, "m"), "the peer is this rank itself");
    EXPECT_THROWS_WITH(group->receive(torch::ones({1}), 0, "m"), "the peer is this rank itself");
    return;
  }
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  for (const int64_t numel : {0, 1, 5, 5000, 300001}) {
    std::vector<Work> works;
    std::vector<at::Tensor> received;
    for (int i = 0; i < 12; ++i) { // more than are in flight without the peer
      works.push_back(group->send(values(numel, me + i, at::kFloat), next, c10::str("message ", i)));
      received.push_back(torch::zeros({numel}));
      works.push_back(group->receive(received.back(), before, c10::str("message ", i)));
    }
    auto sum = torch::ones({3}); // a collective of all beside them
    group->all_reduce(sum, ReduceOp::kSum, "beside").wait();
    for (auto& work : works) work.wait();
    EXPECT_TENSORS_EQUAL(sum, torch::full({3}, n, torch::kFloat));
    for (int i = 0; i < 12; ++i) EXPECT_TENSORS_EQUAL(received[i], values(numel, before + i, at::kFloat));
  }
}

TEST(Collectives, OtherRanksTakeNoPartInAMessage) {
  auto group = world();
  if (group->size() == 1) return;
  const auto sent = values(70000, 3, at::kBFloat16);
  auto received = torch::zeros_like(sent);
  group->counters().reset();
  if (group->rank() == 0) group->send(sent, group->size() - 1, "m").wait();
  if (group->rank() == group->size() - 1) {
    group->receive(received, 0, "m").wait();
    EXPECT_TENSORS_EQUAL(received, sent);
    EXPECT_EQ(group->counters().get(CollectiveKind::kReceive), (CollectiveCounters::Count{1, 140000}));
  }
  EXPECT_THROWS_WITH(group->send(sent, group->rank(), "m"), "the peer is this rank itself");
  EXPECT_THROWS_WITH(group->receive(received, group->size(), "m"), c10::str("peer ", group->size(), " is not in [0, "));
}

std::map<int, int> threads_by_policy() {
  std::map<int, int> threads;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    ++threads[sched_getscheduler(std::stoi(task.path().filename()))];
  }
  return threads;
}

TEST(Collectives, ThreadsOfAGroupDoNotPreemptTheProgram) {
  auto before = threads_by_policy();
  const auto group = world("scheduling");
  auto after = threads_by_policy(); // those that asked the store are about to end
  for (const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
       after[SCHED_OTHER] != before[SCHED_OTHER] && std::chrono::steady_clock::now() < limit; after = threads_by_policy())
    std::this_thread::yield();
  EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
  EXPECT_EQ(after[SCHED_OTHER], before[SCHED_OTHER]);
  EXPECT_EQ(after[SCHED_BATCH] > before[SCHED_BATCH], group->size() > 1);
}

TEST(Collectives, CoalescedCallsShareOneWork) {
  auto group = world();
  const int n = group->size();
  std::vector<at::Tensor> outputs{torch::zeros({n * 3}), torch::zeros({n * 5000})};
  auto work = group->coalesced([&] {
    for (auto& output : outputs)
      group->all_gather_into(output, torch::full({output.numel() / n}, group->rank(), torch::kFloat), "coalesced");
  });
  work.wait();
  EXPECT_TRUE(work.is_completed());
  for (auto& output : outputs)
    EXPECT_TENSORS_EQUAL(output, torch::arange(n).to(torch::kFloat).repeat_interleave(output.numel() / n));
  if (n == 1) return;
  EXPECT_THROWS_WITH(group->coalesced([&] { group->coalesced([] {}); }), "coalesced calls on group default do not nest");
}

TEST(Collectives, CountersAddUpOverGroupsAndIgnoreSingleRanks) {
  auto& context = process_context();
  auto first = world("first"), second = world("second");
  context.reset_counters();
  auto output = torch::zeros({first->size() * 10});
  first->all_gather_into(output, torch::zeros({10}), "one").wait();
  second->all_gather_into(output, torch::zeros({10}), "two").wait();
  auto alone = context.communicator({context.rank()}, at::kCPU);
  auto copy = torch::zeros({10});
  alone->all_gather_into(copy, torch::ones({10}), "alone").wait();
  EXPECT_TENSORS_EQUAL(copy, torch::ones({10}));
  const int64_t calls = first->size() > 1 ? 2 : 0;
  EXPECT_EQ(context.count(CollectiveKind::kAllGather), (CollectiveCounters::Count{calls, calls * output.numel() * 4}));
  EXPECT_EQ(context.count(CollectiveKind::kReduceScatter), CollectiveCounters::Count{});
}

TEST(Collectives, GroupsOfSomeRanks) {
  auto& context = process_context();
  if (context.world_size() < 3) GTEST_SKIP() << "needs 3 ranks";
  const std::vector<int64_t> members{2, 0}; // group order is not rank order
  if (context.rank() != 1 && context.rank() != 3) {
    auto group = context.communicator(members, at::kCPU, "pair");
    auto output = torch::zeros({2}, torch::kLong);
    group->all_gather_into(output, torch::full({1}, context.rank(), torch::kLong), "pair").wait();
    EXPECT_TENSORS_EQUAL(output, torch::tensor({2, 0}, torch::kLong));
  } else {
    EXPECT_THROWS_WITH(context.communicator(members, at::kCPU, "pair"),
                       c10::str("communicator of ranks [2, 0]: rank ", context.rank(), " is not one of them"));
  }
  EXPECT_GE(context.count(CollectiveKind::kAllGather).calls, 0); // what was refused is no communicator
}

TEST(Collectives, MemoryThatIsNotWhatItSeemsIsAnErrorOnTheCaller) {
  auto group = world();
  const auto n = group->size();
  const auto output = torch::zeros({n * 3});
  if (n > 1) {
    const auto other = 2 * ((group->rank() + 1) % n);
    EXPECT_THROWS_WITH(group->reduce_scatter(output.slice(0, other, other + 2), output.slice(0, 0, 2 * n), ReduceOp::kSum, "p"),
                       "output lies in input, but not at this rank's place");
    EXPECT_THROWS_WITH(group->all_to_all(output.slice(0, 0, n), output.slice(0, 0, n), {}, {}, "p"), "input and output overlap");
  }
  EXPECT_THROWS_WITH(group->broadcast(at::_efficientzerotensor({4}, torch::kFloat), 0, "p"),
                     "tensor has no memory; pass tensor.clone()");
  EXPECT_THROWS_WITH(group->broadcast(torch::zeros({4}, torch::kComplexFloat).conj(), 0, "p"),
                     "tensor is a lazily conjugated view, whose memory has other values; pass tensor.resolve_conj()");
  EXPECT_THROWS_WITH(group->all_reduce(torch::ones({4})._neg_view(), ReduceOp::kSum, "p"), "pass tensor.resolve_neg()");
  EXPECT_THROWS_WITH(group->all_reduce(torch::ones({4}), static_cast<ReduceOp>(77), "p"), "there is no reduction 77");
  EXPECT_THROWS_WITH(group->allocate(-1), "-1 bytes");
  group->barrier("still in step");
}

TEST(Collectives, BadArgumentsAreErrorsOnTheCaller) {
  auto group = world();
  const auto n = group->size();
  const auto where = c10::str("of group default [", c10::Join(", ", group->ranks()), "] on rank ", process_context().rank());
  EXPECT_THROWS_WITH(
      group->all_gather_into(torch::zeros({n * 3 + 1}), torch::zeros({3}), "p"),
      c10::str("all_gather 'p' ", where, ": output has ", n * 3 + 1, " elements, needed are ", n, " times the input's 3"));
  const auto output = torch::zeros({n * 3 + 1});
  EXPECT_THROWS_WITH(group->all_gather_into(output.slice(0, 1), output.slice(0, group->rank() * 3, group->rank() * 3 + 3), "p"),
                     "input lies in output, but not at this rank's place");
  EXPECT_THROWS_WITH(group->all_gather_into(torch::zeros({n * 3}), torch::zeros({3}, torch::kInt), "p"),
                     "output is Float and input is Int, they must be equal");
  EXPECT_THROWS_WITH(
      group->reduce_scatter(torch::zeros({2}), torch::zeros({n * 2 + 1}), ReduceOp::kSum, "p"),
      c10::str("reduce_scatter 'p' ", where, ": input has ", n * 2 + 1, " elements, needed are ", n, " times the output's 2"));
  EXPECT_THROWS_WITH(group->all_reduce(torch::zeros({4, 4}).t().narrow(0, 0, 2), ReduceOp::kSum, "p"), "is not contiguous");
  EXPECT_THROWS_WITH(group->all_reduce(torch::zeros({4}, torch::kLong), ReduceOp::kAvg, "p"),
                     "the average of Long is not defined, reduce with sum");
  EXPECT_THROWS_WITH(group->all_reduce(at::Tensor(), ReduceOp::kSum, "p"), "tensor is undefined");
  EXPECT_THROWS_WITH(group->all_reduce(torch::zeros({2}, torch::kMeta), ReduceOp::kSum, "p"),
                     "tensor is on meta, the group's tensors are on cpu");
  EXPECT_THROWS_WITH(group->broadcast(torch::zeros({2}), n, "p"), c10::str("root ", n, " is not in [0, ", n, ")"));
  EXPECT_THROWS_WITH(group->all_to_all(torch::zeros({n}), torch::zeros({n}), {}, std::vector<int64_t>(n, 2), "p"),
                     c10::str("the input splits sum to ", 2 * n, ", input has ", n, " elements"));
  EXPECT_THROWS_WITH(group->all_to_all(torch::zeros({n}), torch::zeros({n}), {}, std::vector<int64_t>(n + 1, 1), "p"),
                     c10::str(n + 1, " input splits for ", n, " ranks"));
  EXPECT_THROWS_WITH(process_context().communicator({0, 0}, at::kCPU), "communicator of ranks [0, 0]: a rank appears twice");
  EXPECT_THROWS_WITH(process_context().communicator({0, 99}, at::kCPU), "rank 99 is not in [0, ");
  // Nothing was sent: the ranks are still in step.
  group->barrier("still in step");
}

} // namespace
} // namespace tessera::collectives_test
