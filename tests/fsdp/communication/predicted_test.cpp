// Steps on clusters that are not there, whose communication is in fewer bits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/simulated_clock.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>

namespace tessera::testing::predicted_test {
namespace {

/// Hosts of `ranks_of_host` ranks, between which a link has 1 Gbit/s and 1 ms.
class Predicted : public ::testing::Test {
 protected:
  void SetUp() override { destroy_process_group(); }
  void TearDown() override {
    if (is_initialized()) destroy_process_group();
    init_process_group();
  }

  static double step_on_hosts(int64_t hosts, int64_t ranks_of_host, tessera::Strategy strategy,
                              const std::string& communication) {
    if (is_initialized()) destroy_process_group();
    const Topology topology{.ranks = hosts * ranks_of_host,
                            .ranks_per_node = ranks_of_host,
                            .in_node = {5e-6, 1 / 5e9, Link::Algorithm::kRing},
                            .between_nodes = {1e-3, 1 / 125e6, Link::Algorithm::kRing}};
    init_simulated_process_group(topology, 0, {.flops_per_second = 1e12});
    const bool has_two = row_of(strategy).outer.has_value();
    const auto mesh = has_two ? init_device_mesh(torch::kMeta, {hosts, ranks_of_host}, {"replicate", "shard"})
                              : init_device_mesh(torch::kMeta, {hosts * ranks_of_host}, {"shard"});
    FullyShardOptions options{.strategy = strategy, .communication = communication_of(communication)};
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    auto model = on_meta([] {
      torch::nn::ModuleList layers;
      for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(1024, 1024));
      return layers;
    });
    for (const auto& layer : *model) fully_shard(*layer, mesh, options);
    fully_shard(*model, mesh, options);
    materialize(*model, [](torch::nn::Module&) {});
    torch::optim::AdamW optimizer(model->parameters());
    for (int step = 0; step < 2; ++step) {
      simulated_clock().reset();
      optimizer.zero_grad();
      auto x = torch::empty({64, 1024}, torch::TensorOptions(torch::kMeta).dtype(torch::kBFloat16));
      for (const auto& layer : *model) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
      x.sum().backward();
      optimizer.step();
    }
    return simulated_clock().elapsed().total;
  }
};

TEST_F(Predicted, AStepBetweenHostsTakesHalfOfTheTimeOrLess) {
  for (const auto strategy : {tessera::Strategy::kFullShard, tessera::Strategy::kHierarchical}) {
    const double plain = step_on_hosts(2, 2, strategy, ""), coded = step_on_hosts(2, 2, strategy, "gather=int8, reduction=int4");
    EXPECT_GE(plain / coded, 1.8) << row_of(strategy).name << ": " << plain << " s and " << coded;
  }
  const double plain = step_on_hosts(4, 4, tessera::Strategy::kHybridShard, "");
  EXPECT_GE(plain / step_on_hosts(4, 4, tessera::Strategy::kHybridShard, "reduction=int4"), 1.8);
}

TEST_F(Predicted, PowerSGDRunsWithoutValues) {
  const double plain = step_on_hosts(2, 2, tessera::Strategy::kHybridShard, "");
  EXPECT_LE(step_on_hosts(2, 2, tessera::Strategy::kHybridShard, "reduction=power-sgd"), plain * 1.01);
}

} // namespace
} // namespace tessera::testing::predicted_test
