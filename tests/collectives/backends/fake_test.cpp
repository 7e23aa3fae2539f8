#include <tessera/tests/support/matchers.h>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>
#include <torch/torch.h>

namespace tessera::fake_test {
namespace {

/// A job of pretended ranks, in place of the program's own.
class FakeGroup : public ::testing::Test {
 protected:
  void SetUp() override { destroy_process_group(); }
  void TearDown() override {
    if (is_initialized()) destroy_process_group();
    init_process_group();
  }
};

TEST_F(FakeGroup, CollectivesGiveWhatEqualRanksWould) {
  init_fake_process_group(/*rank=*/2, /*world_size=*/3);
  const auto mesh = init_device_mesh(torch::kCPU, {3}, {"shard"});
  const auto world = mesh.communicator(0);
  EXPECT_EQ(world->size(), 3);
  EXPECT_EQ(world->rank(), 2);

  const auto own = torch::tensor({1.0f, 2.0f});
  auto all = torch::zeros({6});
  world->all_gather_into(all, own, "gather").wait();
  EXPECT_TENSORS_EQUAL(all, own.repeat({3}));

  auto part = torch::zeros({2});
  world->reduce_scatter(part, torch::arange(6, torch::kFloat), ReduceOp::kSum, "scatter").wait();
  EXPECT_TENSORS_EQUAL(part, torch::tensor({12.0f, 15.0f}));
  auto reduced = own.clone();
  world->all_reduce(reduced, ReduceOp::kAvg, "mean").wait();
  EXPECT_TENSORS_EQUAL(reduced, own);
  world->all_reduce(reduced, ReduceOp::kProduct, "product").wait();
  EXPECT_TENSORS_EQUAL(reduced, own.pow(3));
  auto received = torch::zeros({3});
  world->all_to_all(received, torch::arange(3, torch::kFloat), {}, {}, "exchange").wait();
  EXPECT_TENSORS_EQUAL(received, torch::full({3}, 2.0f));
  world->broadcast(received, 0, "broadcast").wait();
  world->send(own, 0, "there").wait();
  world->receive(received, 0, "back").wait();
  EXPECT_TENSORS_EQUAL(received, torch::full({3}, 2.0f));
  EXPECT_EQ(process_context().count(CollectiveKind::kSend), (CollectiveCounters::Count{1, 8}));
  world->barrier("barrier");
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather), (CollectiveCounters::Count{1, 24}));
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce), (CollectiveCounters::Count{2, 16}));
  EXPECT_EQ(process_context().count(CollectiveKind::kBarrier).calls, 1);
}

// Counts are of elements, whatever the sizes.
TEST_F(FakeGroup, TensorsHaveAnySizes) {
  init_fake_process_group(/*rank=*/2, /*world_size=*/4);
  const auto world = init_device_mesh(torch::kCPU, {4}, {"shard"}).communicator(0);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, {3}, {1, 3}, {2, 3}, {2, 1, 5}}) {
    SCOPED_TRACE(torch::IntArrayRef(sizes));
    const auto part = torch::rand(sizes);
    auto all_sizes = sizes;
    all_sizes.insert(all_sizes.begin(), 4);
    auto all = torch::zeros(all_sizes), expected = part.expand(all_sizes).contiguous();
    world->all_gather_into(all, part, "gather").wait();
    EXPECT_TENSORS_EQUAL(all, expected);

    const auto whole = torch::rand(all_sizes);
    auto reduced = torch::zeros(sizes), received = torch::zeros(all_sizes);
    world->reduce_scatter(reduced, whole, ReduceOp::kAvg, "scatter").wait();
    EXPECT_TENSORS_EQUAL(reduced, whole[2]);
    world->all_to_all(received, whole, {}, {}, "exchange").wait();
    EXPECT_TENSORS_EQUAL(received, whole[2].expand(all_sizes).contiguous());
  }
  auto received = torch::ones({3, 2});
  world->all_to_all(received, torch::arange(8, torch::kFloat).view({4, 2}), {2, 0, 2, 2}, {4, 1, 2, 1}, "exchange").wait();
  EXPECT_TENSORS_EQUAL(received, torch::tensor({5.0f, 6.0f}).expand({3, 2}).contiguous());
}

// As over a transport, which knows nothing of autograd. A group of one rank copies.
TEST_F(FakeGroup, OutputsMayBeParametersAndInferenceTensors) {
  for (const int64_t ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    init_fake_process_group(/*rank=*/0, static_cast<int>(ranks));
    const auto world = init_device_mesh(torch::kCPU, {ranks}, {"shard"}).communicator(0);
    const auto check = [&](const at::Tensor& output) {
      const auto input = torch::ones({4}, torch::requires_grad());
      world->all_gather_into(output, input.detach().narrow(0, 0, 4 / ranks).set_requires_grad(true), "gather").wait();
      world->all_to_all(output, input, {}, {}, "exchange").wait();
      world->all_reduce(output, ReduceOp::kSum, "sum").wait();
      EXPECT_TENSORS_EQUAL(output.detach(), torch::full({4}, static_cast<float>(ranks)));
      EXPECT_FALSE(output.grad_fn());
    };
    check(torch::zeros({4}));
    check(torch::zeros({4}, torch::requires_grad()));
    at::Tensor of_inference;
    {
      const c10::InferenceMode inference;
      of_inference = torch::zeros({4});
      check(torch::zeros({4}));
    }
    check(of_inference);
    destroy_process_group();
  }
}

TEST_F(FakeGroup, EqualBoolsReduceToThemselves) {
  init_fake_process_group(/*rank=*/0, /*world_size=*/3);
  const auto world = init_device_mesh(torch::kCPU, {3}, {"shard"}).communicator(0);
  const auto values = torch::tensor({true, false});
  for (const auto op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin}) {
    auto tensor = values.clone(), part = torch::zeros({2}, torch::kBool);
    world->all_reduce(tensor, op, "any").wait();
    EXPECT_TENSORS_EQUAL(tensor, values);
    world->reduce_scatter(part, values.repeat({3}), op, "scatter").wait();
    EXPECT_TENSORS_EQUAL(part, values);
  }
}

// Every rank has the same batch, so the mean of the gradients is this rank's own.
TEST_F(FakeGroup, AShardedModelTrainsThisRanksPart) {
  for (const int64_t ranks : {1, 8, 64}) {
    init_fake_process_group(/*rank=*/0, static_cast<int>(ranks));
    torch::manual_seed(1);
    torch::nn::Linear model(16, ranks), twin(16, ranks);
    {
      const torch::NoGradGuard no_grad;
      twin->weight.copy_(model->weight);
      twin->bias.copy_(model->bias);
    }
    fully_shard(model, init_device_mesh(torch::kCPU, {ranks}, {"shard"}), {.layout = BufferLayout::kPerParameter});
    const auto input = torch::randn({4, 16});
    twin->forward(input).sum().backward();
    process_context().reset_counters();
    // What it gathers is its own first row, as often as there are ranks.
    const auto first_row = torch::nn::functional::linear(input, twin->weight.narrow(0, 0, 1), twin->bias.narrow(0, 0, 1));
    const auto output = model->forward(input);
    EXPECT_TENSORS_CLOSE(output, first_row.expand({4, ranks}), 1e-5, 1e-6);
    output.sum().backward();
    EXPECT_TENSORS_EQUAL(to_local(model->weight.grad()), twin->weight.grad().narrow(0, 0, 1));
    EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, ranks > 1 ? 1 : 0);
    destroy_process_group();
  }
}

TEST_F(FakeGroup, BadArgumentsAreErrors) {
  EXPECT_THROWS_WITH(init_fake_process_group(0, 0), "init_fake_process_group: world_size is 0, but must be positive");
  EXPECT_THROWS_WITH(init_fake_process_group(3, 3), "init_fake_process_group: rank 3 is not in [0, 3)");
  EXPECT_THROWS_WITH(init_fake_process_group(-1, 3), "init_fake_process_group: rank -1 is not in [0, 3)");
  init_fake_process_group(0, 2);
  EXPECT_THROWS_WITH(init_fake_process_group(0, 2), "there is a process group already");
  EXPECT_THROWS_WITH(init_process_group(), "called already");
}

} // namespace
} // namespace tessera::fake_test
