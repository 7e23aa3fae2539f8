// Sharding over more ranks than there are: gradients where a group is cut into many equal parts, and that what a rank allocates
// does not grow with their number.
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/tests/support/allocations.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::simulated_cluster_test {
namespace {

using torch::nn::Linear;

const Topology kCluster{.ranks_per_node = 8,
                        .in_node = {3e-6, 1 / 360e9, Link::Algorithm::kRing},
                        .between_nodes = {1e-5, 1 / 400e9, Link::Algorithm::kRecursive}};

class SimulatedCluster : public ::testing::Test {
 protected:
  void SetUp() override { destroy_process_group(); }
  void TearDown() override { begin_again(); }

  static void join(int64_t ranks) {
    if (is_initialized()) destroy_process_group();
    auto topology = kCluster;
    topology.ranks = ranks;
    init_simulated_process_group(topology, 0, {.flops_per_second = 1e14});
  }
  static void begin_again() {
    if (is_initialized()) destroy_process_group();
    init_process_group();
  }
};

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t width) {
    for (int i = 0; i < 4; ++i) layers->push_back(Linear(width, width));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Stack);

Stack shard_on_meta(const DeviceMesh& mesh, int64_t width, const FullyShardOptions& options = {}) {
  auto model = on_meta([&] { return Stack(width); });
  for (const auto& layer : *model->layers) fully_shard(*layer, mesh, options);
  fully_shard(*model, mesh, options);
  materialize(*model, [](torch::nn::Module&) {});
  return model;
}

void step(Stack& model, torch::optim::Optimizer& optimizer, int64_t width) {
  optimizer.zero_grad();
  model->forward(torch::empty({2, width}, torch::kMeta)).sum().backward();
  optimizer.step();
}

/// Bytes that making a mesh, sharding and a second step allocate.
std::array<int64_t, 3> bytes_of(const std::vector<int64_t>& shape, const FullyShardOptions& options) {
  constexpr int64_t kWidth = 4096;
  const AllocationMeter meter;
  size_t before = 0;
  const auto take = [&] { return static_cast<int64_t>(meter.total() - std::exchange(before, meter.total())); };
  const auto mesh = init_device_mesh(torch::kMeta, shape);
  const auto making = take();
  auto model = shard_on_meta(mesh, kWidth, options);
  const auto sharding = take();
  torch::optim::AdamW optimizer(model->parameters());
  step(model, optimizer, kWidth);
  take();
  step(model, optimizer, kWidth);
  return {making, sharding, take()};
}

TEST_F(SimulatedCluster, AStepOnTheMetaDeviceIsPredicted) {
  join(16);
  auto model = shard_on_meta(init_device_mesh(torch::kMeta, {16}), 1024);
  EXPECT_TRUE(to_local(model->parameters()[0]).is_meta());
  EXPECT_EQ(to_local(model->parameters()[0]).numel(), (1024 * 1024 + 1024) / 16) << "of weight and bias together";
  torch::optim::AdamW optimizer(model->parameters());
  step(model, optimizer, 1024);
  process_context().reset_counters();
  auto& clock = simulated_clock();
  clock.reset();
  step(model, optimizer, 1024);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 7) << "two a layer, one for the last";
  EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, 4);
  // Weights and inputs have gradients, but the first layer's input.
  EXPECT_EQ(clock.flops(), (3 * 4 - 1) * 2 * 2 * 1024 * 1024);
  const auto time = clock.elapsed();
  EXPECT_NEAR(time.compute, clock.flops() / 1e14, 1e-12);
  EXPECT_NEAR(time.total, time.compute + time.exposed, 1e-12);
  EXPECT_GT(time.exposed, 0);
  EXPECT_LE(time.exposed, time.communication);
  EXPECT_TRUE(to_local(model->parameters()[0].grad()).is_meta());
}

TEST_F(SimulatedCluster, ARankAllocatesNoMoreAmongMore) {
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const bool hybrid : {false, true}) {
      const auto measure = [&](int64_t ranks) {
        join(ranks);
        const auto shape = hybrid ? std::vector<int64_t>{ranks / 8, 8} : std::vector<int64_t>{ranks};
        const FullyShardOptions options{.layout = layout};
        bytes_of(shape, options); // what is made once: caches of operators, specs
        return bytes_of(shape, options);
      };
      const auto few = measure(512), many = measure(65536);
      const double growth_of_log = std::log(65536) / std::log(512);
      const std::array<const char*, 3> names{"the mesh", "sharding", "a step"};
      for (size_t i = 0; i < names.size(); ++i) {
        EXPECT_LE(many[i], growth_of_log * static_cast<double>(few[i]))
            << names[i] << (hybrid ? ", hybrid" : "") << (layout == BufferLayout::kRagged ? ", ragged" : ", per parameter");
      }
    }
  }
}

// Every rank has the same batch, so the mean of the gradients is this rank's own.
TEST_F(SimulatedCluster, ARankAmongManyGetsItsPartOfTheGradient) {
  constexpr int64_t kRanks = 200, kRows = 8;
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    if (is_initialized()) destroy_process_group();
    init_fake_process_group(/*rank=*/150, kRanks);
    torch::manual_seed(1);
    Linear model(torch::nn::LinearOptions(16, kRanks * kRows).bias(false)), twin(model->options);
    const auto input = torch::randn({4, 16}), weights = torch::randn({4, kRanks * kRows});
    fully_shard(model, init_device_mesh(torch::kCPU, {kRanks}), {.layout = layout});
    for (int i = 0; i < 2; ++i) { // the second is added in the buffer
      const auto sync = i == 1;
      fsdp(*model).set_requires_gradient_sync(sync);
      (model->forward(input) * weights).sum().backward();
      (twin->forward(input) * weights).sum().backward();
    }
    EXPECT_TENSORS_CLOSE(to_local(model->weight.grad()), twin->weight.grad().narrow(0, 150 * kRows, kRows), 1e-5, 1e-6);
  }
}

} // namespace
} // namespace tessera::testing::simulated_cluster_test
