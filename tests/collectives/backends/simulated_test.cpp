#include <tessera/tests/support/matchers.h>

#include <tessera/activations/recompute.h>
#include <tessera/collectives/backends/simulated/cost.h>
#include <tessera/collectives/backends/simulated/operator_watch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <string>

namespace tessera::simulated_test {
namespace {

constexpr double kRate = 1e6; // operations a second
const Topology kTwoNodes{.ranks = 8,
                         .ranks_per_node = 4,
                         .in_node = {.alpha = 0.25, .beta = 1},
                         .between_nodes = {.alpha = 2, .beta = 8, .algorithm = Link::Algorithm::kRecursive}};

/// Rank 0 of simulated ranks, in place of the program's own job. Times are in numbers that add up exactly.
class SimulatedGroup : public ::testing::Test {
 protected:
  void SetUp() override { destroy_process_group(); }
  void TearDown() override {
    if (is_initialized()) destroy_process_group();
    init_process_group();
  }
  /// Floating-point operations of a call.
  static double flops(const std::function<void()>& call) {
    simulated_clock().reset();
    call();
    return simulated_clock().flops();
  }
  static torch::Tensor bytes(int64_t count) { return torch::zeros({count}, torch::kByte); }
};

double seconds_of(CollectiveKind kind, int64_t bytes, const RankList& ranks, const Topology& topology) {
  double sum = 0;
  for (const auto& phase : internal::phases_of(kind, bytes, internal::GroupShape::of(ranks, topology), topology))
    sum += phase.latency + phase.transfer;
  return sum;
}

TEST(CollectiveCost, FollowsTheFormulasInANode) {
  const Topology ring{.ranks = 4, .ranks_per_node = 4, .in_node = {.alpha = 10, .beta = 1}};
  const auto all = RankList::first(4);
  EXPECT_EQ(seconds_of(CollectiveKind::kAllGather, 400, all, ring), 3 * 10 + 300);
  EXPECT_EQ(seconds_of(CollectiveKind::kReduceScatter, 400, all, ring), 3 * 10 + 300);
  EXPECT_EQ(seconds_of(CollectiveKind::kAllReduce, 400, all, ring), 2 * (3 * 10 + 300));
  EXPECT_EQ(seconds_of(CollectiveKind::kAllToAll, 400, all, ring), 3 * 10 + 300);
  EXPECT_EQ(seconds_of(CollectiveKind::kBroadcast, 4, all, ring), 2 * 10 + 2 * 4) << "a tree";
  EXPECT_EQ(seconds_of(CollectiveKind::kBroadcast, 400, all, ring), 5 * 10 + 600) << "a scatter and an all-gather";
  EXPECT_EQ(seconds_of(CollectiveKind::kBarrier, 0, all, ring), 2 * 10);
  EXPECT_EQ(seconds_of(CollectiveKind::kSend, 400, all, ring), 10 + 400);
  auto recursive = ring;
  recursive.in_node.algorithm = Link::Algorithm::kRecursive;
  EXPECT_EQ(seconds_of(CollectiveKind::kAllGather, 400, all, recursive), 2 * 10 + 300);
}

// Between the nodes each rank exchanges its column, and all ranks of a node share its link; inside it gathers the columns.
TEST(CollectiveCost, FollowsTheFormulasOverNodes) {
  const auto all = RankList::first(8);
  const double between = 1 * 2 + 4 * (800.0 / 4 / 2) * 8, inside = 3 * 0.25 + 600;
  EXPECT_EQ(seconds_of(CollectiveKind::kAllGather, 800, all, kTwoNodes), between + inside);
  EXPECT_EQ(seconds_of(CollectiveKind::kReduceScatter, 800, all, kTwoNodes), inside + between);
  EXPECT_EQ(seconds_of(CollectiveKind::kAllReduce, 800, all, kTwoNodes), 2 * (inside + between));
  // One rank a node: the three other groups of the same nodes use the link at the same time.
  EXPECT_EQ(seconds_of(CollectiveKind::kAllReduce, 800, RankList({1, 5}), kTwoNodes), 2 * (2 + 4 * 400 * 8));
  EXPECT_EQ(seconds_of(CollectiveKind::kAllGather, 800, RankList({4, 5}), kTwoNodes), 0.25 + 400);
}

TEST(CollectiveCost, KnowsTheShapeOfAnyGroup) {
  const auto shape = [](const RankList& ranks) {
    const auto found = internal::GroupShape::of(ranks, kTwoNodes);
    return std::pair(found.nodes, found.ranks_a_node);
  };
  EXPECT_EQ(shape(RankList::first(8)), std::pair(int64_t{2}, int64_t{4}));
  EXPECT_EQ(shape({0, 2, 4, 6}), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(shape({3, 4}), std::pair(int64_t{2}, int64_t{1}));
  EXPECT_EQ(shape({0, 4}), std::pair(int64_t{2}, int64_t{1}));
  EXPECT_EQ(shape({6, 1, 0}), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(shape({5}), std::pair(int64_t{1}, int64_t{1}));
}

TEST_F(SimulatedGroup, CollectivesRunBesideTheComputeAndBehindEachOther) {
  init_simulated_process_group({.ranks = 2, .ranks_per_node = 2, .in_node = {.alpha = 1, .beta = 1}}, 0,
                               {.flops_per_second = kRate});
  auto& clock = simulated_clock();
  const auto group = process_context().communicator({0, 1}, at::kCPU),
             other = process_context().communicator({0, 1}, at::kCPU, "other");
  auto first = group->all_reduce(bytes(4), ReduceOp::kSum, "a");  // 2 × (1 + 2): ends at 6
  auto second = group->all_reduce(bytes(4), ReduceOp::kSum, "b"); // after it: at 12
  auto beside = other->all_gather_into(bytes(2), bytes(1), "c");  // 1, and a byte in the gap from 3 on: at 4
  clock.add_compute(5);
  EXPECT_FALSE(first.is_completed());
  EXPECT_TRUE(beside.is_completed());
  EXPECT_EQ(clock.elapsed().total, 5);
  first.wait();
  EXPECT_EQ(clock.elapsed().total, 6);
  EXPECT_EQ(clock.elapsed().exposed, 1);
  clock.add_compute(7);
  second.wait();
  EXPECT_TRUE(second.is_completed());
  beside.wait();
  EXPECT_EQ(clock.elapsed().total, 13);
  EXPECT_EQ(clock.elapsed().compute, 12);
  EXPECT_EQ(clock.elapsed().exposed, 1) << "the second was hidden behind the compute";
  clock.reset();
  group->barrier("d");
  EXPECT_EQ(clock.elapsed().total, 1);
  EXPECT_EQ(clock.elapsed().communication, 1);
}

// The group lies on two nodes, and each message on those of its two ranks.
TEST_F(SimulatedGroup, AMessageTakesTheLinkBetweenItsRanks) {
  init_simulated_process_group(kTwoNodes, 0, {.flops_per_second = kRate});
  auto& clock = simulated_clock();
  const auto group = process_context().communicator(RankList::first(8), at::kCPU);
  const double inside = 0.25 + 8, between = 2 + 4 * 8 * 8;
  for (const auto& [peer, seconds] : {std::pair(3, inside), std::pair(4, between)}) {
    clock.reset();
    group->send(bytes(8), peer, "there").wait();
    EXPECT_EQ(clock.elapsed().total, seconds);
    auto received = bytes(8);
    group->receive(received, peer, "back").wait();
    EXPECT_EQ(clock.elapsed().total, 2 * seconds);
  }
  EXPECT_THROWS_WITH(group->send(bytes(8), 8, "there"), "peer 8 is not in [0, 8)");
}

TEST_F(SimulatedGroup, CollectivesGiveWhatEqualRanksWould) {
  init_simulated_process_group({.ranks = 3, .ranks_per_node = 3}, 1);
  const auto group = process_context().communicator({0, 1, 2}, at::kCPU);
  auto all = torch::zeros({6});
  auto work = group->coalesced([&] { group->all_gather_into(all, torch::tensor({1.0f, 2.0f}), "gather"); });
  work.wait();
  EXPECT_TENSORS_EQUAL(all, torch::tensor({1.0f, 2.0f}).repeat({3}));
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather), (CollectiveCounters::Count{1, 24}));
}

// Without a rate the process's own time counts, but not what it takes to copy for the pretended ranks.
TEST_F(SimulatedGroup, MeasuresTheRanksOwnTime) {
  init_simulated_process_group({.ranks = 2, .ranks_per_node = 2, .in_node = {.alpha = 1000}}, 0);
  auto& clock = simulated_clock();
  clock.reset();
  const auto before = clock.elapsed();
  const auto group = process_context().communicator({0, 1}, at::kCPU);
  group->all_reduce(torch::ones({8}), ReduceOp::kSum, "a").wait();
  const auto after = clock.elapsed();
  EXPECT_GT(after.compute, before.compute);
  EXPECT_GT(after.exposed, 1990) << "two messages of 1000 s, less this process's own time";
  EXPECT_NEAR(after.total, after.compute + after.exposed, 1e-6);
  EXPECT_EQ(clock.flops(), 0);
}

TEST_F(SimulatedGroup, CountsFloatingPointOperations) {
  init_simulated_process_group({.ranks = 2, .ranks_per_node = 2}, 0, {.flops_per_second = kRate});
  auto& clock = simulated_clock();
  const auto meta = torch::TensorOptions(torch::kMeta);
  EXPECT_EQ(flops([&] { torch::mm(torch::rand({3, 4}), torch::rand({4, 5})); }), 2 * 3 * 4 * 5);
  EXPECT_EQ(flops([&] { torch::matmul(torch::rand({2, 3, 4}, meta), torch::rand({2, 4, 5}, meta)); }), 2 * 2 * 3 * 4 * 5);
  EXPECT_EQ(flops([&] { torch::rand({3, 4}) + 1; }), 0);
  const auto weight = torch::rand({5, 4}, meta).requires_grad_();
  const auto input = torch::rand({3, 4}, meta).requires_grad_();
  EXPECT_EQ(flops([&] { torch::linear(input, weight, torch::rand({5}, meta)).sum().backward(); }), 3 * 2 * 3 * 4 * 5);
  const auto image = torch::rand({2, 3, 8, 8}).requires_grad_(), kernel = torch::rand({4, 3, 3, 3}).requires_grad_();
  EXPECT_EQ(flops([&] { torch::conv2d(image, kernel, {}, 1, 1).sum().backward(); }), 3 * 2 * (2 * 8 * 8) * (4 * 3 * 3 * 3));
  const auto matrix = torch::rand({3, 5}), left = torch::rand({2, 3, 4}), right = torch::rand({2, 4, 5});
  EXPECT_EQ(flops([&] { matrix.clone().addmm_(left[0], right[0]); }), 2 * 3 * 4 * 5);
  EXPECT_EQ(flops([&] { matrix.repeat({2, 1, 1}).baddbmm_(left, right); }), 2 * 2 * 3 * 4 * 5);
  torch::mm(torch::rand({10, 10}), torch::rand({10, 10}));
  clock.reset();
  torch::mm(torch::rand({100, 100}), torch::rand({100, 50}));
  EXPECT_NEAR(clock.elapsed().compute, 1, 1e-9) << "10^6 operations";
}

TEST_F(SimulatedGroup, CountsWhatAttentionDoesNotSkip) {
  constexpr int64_t kPairs = 24, kSeen = 10, kSeenByMore = 9; // of 4 queries and 6 keys; under a mask; of 4 queries and 3 keys
  init_simulated_process_group({.ranks = 2, .ranks_per_node = 2}, 0,
                               {.flops_per_second = kRate, .attention_flops_per_second = kRate / 4});
  const auto tensor = [](int64_t length) { return torch::rand({1, 2, length, 8}).requires_grad_(); };
  const auto attend = [&](int64_t keys, bool is_causal) {
    const auto q = tensor(4), k = tensor(keys), v = tensor(keys);
    return flops([&] { std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, is_causal)).sum().backward(); });
  };
  constexpr int64_t kProducts = 2 + 5, kPair = 2 * 2 * 8; // forward and backward; two operations, two heads of eight
  EXPECT_EQ(attend(6, false), kProducts * kPair * kPairs);
  EXPECT_EQ(attend(6, true), kProducts * kPair * kSeen);
  EXPECT_EQ(attend(3, true), kProducts * kPair * kSeenByMore);
  EXPECT_NEAR(simulated_clock().elapsed().compute, 4 * kProducts * kPair * kSeenByMore / kRate, 1e-12) << "at attention's rate";
}

// Some operators call others of which each would count.
TEST_F(SimulatedGroup, CountsAnOperationOnce) {
  init_simulated_process_group({.ranks = 2, .ranks_per_node = 2}, 0, {.flops_per_second = kRate});
  const auto matrix = torch::rand({3, 4}), vector = torch::rand({4}), left = torch::rand({2, 3, 4}),
             right = torch::rand({2, 4, 5});
  auto result = torch::rand({3}), sum = torch::rand({3, 5});
  EXPECT_EQ(flops([&] { torch::mv(matrix, vector); }), 2 * 3 * 4);
  EXPECT_EQ(flops([&] { torch::mv_out(result, matrix, vector); }), 2 * 3 * 4);
  EXPECT_EQ(flops([&] { result.addmv_(matrix, vector); }), 2 * 3 * 4);
  EXPECT_EQ(flops([&] { torch::addbmm(sum, left, right); }), 2 * 2 * 3 * 4 * 5);
  EXPECT_EQ(flops([&] { sum.addbmm_(left, right); }), 2 * 2 * 3 * 4 * 5);
  const auto rows = torch::rand({16, 32}).to(torch::kBFloat16), experts = torch::rand({2, 32, 48}).to(torch::kBFloat16);
  const auto ends = torch::tensor({8, 16}, torch::kInt);
  EXPECT_EQ(flops([&] { at::_grouped_mm(rows, experts, ends); }), 2 * 16 * 32 * 48);
  EXPECT_EQ(flops([&] { at::_grouped_mm(rows.view({2, 8, 32}), experts); }), 2 * 16 * 32 * 48);
  const auto eighth = [](const torch::Tensor& values) { return values.to(torch::kFloat8_e4m3fn); };
  const auto one = torch::ones({});
  EXPECT_EQ(flops([&] {
              at::_scaled_mm(eighth(rows), eighth(torch::rand({48, 32})).t(), one, one, {}, {}, torch::kBFloat16);
            }),
            2 * 16 * 32 * 48);
}

TEST(Topology, IsReadFromJson) {
  const auto topology = Topology::from_json(R"({"ranks": 64, "ranks_per_node": 8, "in_node": {"alpha": 3e-6, "beta": 2.5e-12},
    "between_nodes": {"alpha": 1e-5, "beta": 1e-10, "algorithm": "recursive"}})");
  EXPECT_EQ(topology.ranks, 64);
  EXPECT_EQ(topology.ranks_per_node, 8);
  EXPECT_EQ(topology.in_node.alpha, 3e-6);
  EXPECT_EQ(topology.in_node.algorithm, Link::Algorithm::kRing);
  EXPECT_EQ(topology.between_nodes.algorithm, Link::Algorithm::kRecursive);
  EXPECT_EQ(Topology::from_json(topology.to_json()).to_json(), topology.to_json());
}

TEST(Topology, BadOnesAreErrors) {
  EXPECT_THROWS_WITH(Topology::from_json("{"), "topology: ");
  EXPECT_THROWS_WITH(Topology::from_json("[]"), "topology: the topology is no object, but an array");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"rank": 1})"), "topology: the topology has an unknown key \"rank\"");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"ranks": 1.5})"), "\"ranks\" of the topology is 1.5, but must be a whole number");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"ranks": 0})"), "topology: there are 0 ranks, but must be between 1 and ");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"ranks_per_node": 0})"), "topology: a node has 0 ranks");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"ranks_per_node": 1099511627776})"),
                     "topology: a node has 1099511627776 ranks, but must have between 1 and 2147483647");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"in_node": {"alpha": "x"}})"), "\"alpha\" of in_node is \"x\"");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"in_node": {"beta": -1}})"), "beta of in_node is -1, but must be a time");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"in_node": {"algorithm": "star"}})"), "must be \"ring\" or \"recursive\"");
  const auto deep = std::string(200'000, '[') + std::string(200'000, ']');
  EXPECT_THROWS_WITH(Topology::from_json(deep), "topology: the topology is no object, but an array");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"in_node": )" + deep + "}"), "topology: in_node is no object, but an array");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"ranks": )" + deep + "}"), "\"ranks\" of the topology is an array, but must be");
  EXPECT_THROWS_WITH(Topology::from_json(R"({"in_node": {"algorithm": )" + deep + "}}"), "\"algorithm\" of in_node is an array");
  EXPECT_THROWS_WITH(Topology::read("/no/such/file"), "topology: cannot read /no/such/file");
}

/// Compute seconds of a call, at an operation and a byte a second.
double seconds_of_call(const std::function<void()>& call) {
  simulated_clock().reset();
  call();
  return simulated_clock().elapsed().compute;
}

TEST_F(SimulatedGroup, AnOperatorTakesTheLongerOfItsWorkAndItsBytes) {
  init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1, .bytes_per_second = 1});
  const auto a = torch::ones({8, 16}), b = torch::ones({16, 4}), c = torch::ones({8, 16});
  EXPECT_EQ(seconds_of_call([&] { torch::mm(a, b); }), std::max(2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4)));
  EXPECT_EQ(seconds_of_call([&] { a.add(c); }), 4 * 3 * 8 * 16) << "two are read, one is written";
  EXPECT_EQ(seconds_of_call([&] { a.clone(); }), 4 * 2 * 8 * 16);
  EXPECT_EQ(seconds_of_call([&] { a.t().view({4, 4, 8}).select(0, 1).detach(); }), 0) << "views move nothing";
  EXPECT_EQ(seconds_of_call([&] { torch::empty({1000}); }), 0);
  EXPECT_EQ(seconds_of_call([&] { torch::zeros({1000}); }), 4000);
  const auto one = torch::ones({1});
  EXPECT_EQ(seconds_of_call([&] { a.add(one.expand({8, 16})); }), 4 * (2 * 8 * 16 + 1)) << "an expanded tensor is read once";
}

TEST_F(SimulatedGroup, AnOperatorTakesItsLaunch) {
  init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1e30, .bytes_per_second = 1e30, .launch_seconds = 1});
  const auto a = torch::ones({8, 8});
  EXPECT_NEAR(seconds_of_call([&] { a.add(a).mul(a); }), 2, 1e-9);
  EXPECT_NEAR(seconds_of_call([&] { torch::linear(a, a); }), 1, 1e-9) << "what a product makes of other calls is not counted";
}

TEST_F(SimulatedGroup, AKernelOfAnOperatorOnDTensorsTakesMore) {
  init_simulated_process_group({.ranks = 2}, 0,
                               {.flops_per_second = 1e30, .bytes_per_second = 1e30, .launch_seconds = 1, .dtensor_seconds = 2});
  const auto a = torch::ones({8, 8});
  const auto split = from_local(a, init_device_mesh(torch::kCPU, {2}), {Shard{0}});
  EXPECT_NEAR(seconds_of_call([&] { a.add(a); }), 1, 1e-9);
  split.add(split); // the first makes a plan
  EXPECT_NEAR(seconds_of_call([&] { split.add(split); }), 3, 1e-9);
  split.view({4, 4, -1});
  EXPECT_NEAR(seconds_of_call([&] { split.view({4, 4, -1}); }), 2, 1e-9) << "a view has no kernel";
  EXPECT_NEAR(seconds_of_call([&] { a.add(a); }), 1, 1e-9);
}

TEST_F(SimulatedGroup, AProductInFp8TakesItsRate) {
  init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1, .float8_flops_per_second = 2});
  const auto a = torch::ones({16, 16}).to(torch::kFloat8_e4m3fn), scale = torch::ones({});
  EXPECT_EQ(seconds_of_call([&] { at::_scaled_mm(a, a.t(), scale, scale, {}, {}, torch::kFloat); }), 16 * 16 * 16);
  EXPECT_EQ(seconds_of_call([&] { torch::mm(torch::ones({16, 16}), torch::ones({16, 16})); }), 2 * 16 * 16 * 16);
}

TEST_F(SimulatedGroup, AProductThatIsBrokenOffTakesNothing) {
  init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1});
  const auto a = torch::ones({4, 4}), weight = torch::ones({4, 4}).requires_grad_();
  const auto step = [&](const RecomputeOptions& options) {
    const auto part = [&](const torch::Tensor& x) { return torch::mm(torch::mm(x, weight).relu(), weight); };
    recompute(options, part, a).sum().backward();
  };
  constexpr double kProduct = 2 * 4 * 4 * 4;
  const double plain = 2 + 3; // products forward and backward: the batch has no gradient
  EXPECT_EQ(seconds_of_call([&] { step({}); }), (plain + 1) * kProduct) << "the second product ends the second run";
  EXPECT_EQ(seconds_of_call([&] { step({.early_stop = false}); }), (plain + 2) * kProduct);
  const auto keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) { return op.schema().name() == "aten::mm"; };
  EXPECT_EQ(seconds_of_call([&] { step({.keep = keep}); }), plain * kProduct) << "what is kept is not computed again";
}

TEST_F(SimulatedGroup, OperatorsAreCounted) {
  init_fake_process_group(0, 2);
  const auto a = torch::ones({8, 8});
  const auto split = from_local(a, init_device_mesh(torch::kCPU, {2}), {Shard{0}});
  split.mul(split); // the first makes a plan
  const auto counts = internal::count_operators([&] {
    a.add(a).t();
    split.mul(split).transpose(0, 1);
  });
  EXPECT_EQ(counts.kernels, 2);
  EXPECT_EQ(counts.on_parts, 2);
}

TEST_F(SimulatedGroup, ARankThatCarriesItsBytesWaitsForThem) {
  for (const bool overlaps : {true, false}) {
    init_simulated_process_group({.ranks = 4, .ranks_per_node = 4, .in_node = {.alpha = 1, .beta = 1}}, 0,
                                 {.flops_per_second = 1, .overlaps = overlaps});
    const auto mesh = init_device_mesh(torch::kCPU, {4});
    const auto part = bytes(4);
    auto all = bytes(16);
    auto work = mesh.communicator()->all_gather_into(all, part, "parts");
    torch::mm(torch::ones({1, 100}), torch::ones({100, 1}));
    work.wait();
    const auto time = simulated_clock().elapsed();
    EXPECT_EQ(time.compute, 200);
    EXPECT_EQ(time.communication, 3 + 12);
    EXPECT_EQ(time.total, overlaps ? 200 : 215);
    destroy_process_group();
  }
}

TEST_F(SimulatedGroup, BadArgumentsAreErrors) {
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0, {.bytes_per_second = 1}), "without flops_per_second");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1, .bytes_per_second = 0}),
                     "bytes_per_second is 0");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1, .launch_seconds = 1}),
                     "launch_seconds or dtensor_seconds is given without bytes_per_second");
  EXPECT_THROWS_WITH(
      init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 1, .bytes_per_second = 1, .launch_seconds = -1}),
      "launch_seconds is -1");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0, {.float8_flops_per_second = 1}),
                     "float8_flops_per_second is given without flops_per_second");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 2), "init_simulated_process_group: rank 2 is not in [0, 2)");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0, {.flops_per_second = 0}), "flops_per_second is 0");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = -1}, 0), "there are -1 ranks");
  init_fake_process_group(0, 2);
  EXPECT_THROWS_WITH(simulated_clock(), "the process group is no simulated one");
  EXPECT_THROWS_WITH(init_simulated_process_group({.ranks = 2}, 0), "there is a process group already");
}

} // namespace
} // namespace tessera::simulated_test
