// Parts of sequences that go from stage to stage as DTensors, and losses of sequences that several ranks have together.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

#include <mutex>

namespace tessera::testing::composed::parts_test {
namespace {

using torch::Tensor;

struct TwoImpl : torch::nn::Module {
  Tensor first = register_parameter("first", torch::full({3}, 2.0)), second = register_parameter("second", torch::full({3}, 3.0));
};
TORCH_MODULE(Two);

/// The second stage knows how the parts lie: in the order of head and tail, with padding.
TEST(PartsOfSequences, KeepTheirOrderFromStageToStage) {
  if (world_size() > 1) return;
  const auto text = torch::arange(2 * 5 * 3, torch::kFloat).view({2, 5, 3});
  for (const auto order : {PartOrder::kHeadTail, PartOrder::kContiguous}) {
    run_as(4, [&] {
      const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "cp"});
      Two model;
      auto* const two = model.get();
      const auto scaled = [](const Tensor& x, const Tensor& weight) { // each rank's part alone
        const DTensor part(x);
        const Tensor y = from_local(to_local(x) * weight, part.mesh(), part.placements(), part.sizes().vec());
        return y;
      };
      PipelineLayers layers(*model);
      layers.add("first", {"first"}, [two, scaled](const Tensor& x) { return scaled(x, two->first); });
      layers.add("second", {"second"}, [two, scaled](const Tensor& x) { return scaled(x, two->second); });
      const auto parts = split_sequence({text}, {1}, mesh["cp"], {.order = order});
      Pipeline pipeline(split(layers, mesh["pp"]), PipelineScheduleKind::k1F1B,
                        {.sum =
                             [&](const PipelineValue& y, const PipelineValue&) {
                               EXPECT_EQ(DTensor(y.toTensor()).mesh(), parts.mesh);
                               return to_local(y.toTensor()).sum();
                             }},
                        {.data_mesh = mesh["cp"]});
      const std::vector<PipelineValue> batches{Tensor(parts.tensors[0]), Tensor(parts.tensors[0])};
      for (const auto& each : pipeline.predict(batches)) EXPECT_TENSORS_EQUAL(merge_sequence(each.toTensor(), 1), text * 6);
      EXPECT_NEAR(pipeline.step(batches).item<double>(), text.sum().item<double>() * 6 / 2, 1e-3);
    });
  }
}

MoE make_layer(int64_t shared) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  MoEOptions options{.width = 8, .hidden = 8, .experts = 4, .shared_hidden = shared};
  options.losses = {.balance = 0.3, .scope = BalanceScope::kSequence};
  MoE layer(options);
  layer->to(torch::kDouble);
  return layer;
}

struct Balanced {
  Tensor output, input_gradient, router_gradient, loss;
};

/// The whole, of one rank.
Balanced balance_alone(const Tensor& x, int64_t shared) {
  auto layer = make_layer(shared);
  const auto input = x.detach().clone().requires_grad_();
  const auto output = layer(input);
  output.square().sum().backward();
  return {output.detach(), input.grad(), layer->router().weight.grad(), layer->statistics().balance_loss};
}

Tensor draw_input() {
  auto generator = at::detail::createCPUGenerator(9);
  return torch::randn({3, 8, 8}, generator, torch::kDouble);
}

TEST(SequenceBalance, IsThatOfOneRankUnderTensorParallelism) {
  if (world_size() > 1) return;
  const auto x = draw_input();
  const auto expected = balance_alone(x, 8);
  for (const bool splits_time : {false, true}) {
    run_as(2, [&] {
      const auto mesh = init_device_mesh(torch::kCPU, {1, 2}, {"dp", "tp"});
      auto layer = make_layer(8);
      const auto experts = expert_mesh(mesh, 2);
      expert_parallel(*layer, experts["ep"], {.tokens = mesh, .tensor_parallel = mesh["tp"]});
      parallelize(*layer, mesh["tp"], {{"shared.up", Colwise{}}, {"shared.gate", Colwise{}}, {"shared.down", Rowwise{}}});
      fully_shard(*layer->experts(), experts["efsdp"]);
      fully_shard(*layer, mesh["dp"]);
      const Tensor input = from_local(x, mesh["tp"], {Replicate{}});
      const auto leaf = input.detach().requires_grad_();
      const Tensor taken = splits_time ? Tensor(DTensor(leaf).redistribute({Shard{1}})) : leaf;
      const Tensor output = layer(taken);
      output.square().sum().backward();
      EXPECT_TENSORS_CLOSE(DTensor(output.detach()).full_tensor(), expected.output, 1e-9, 1e-9);
      EXPECT_TENSORS_CLOSE(DTensor(leaf.grad()).full_tensor(), expected.input_gradient, 1e-9, 1e-9);
      auto loss = layer->statistics().balance_loss.clone().reshape({1});
      mesh["tp"].communicator()->all_reduce(loss, ReduceOp::kAvg, "loss").wait();
      EXPECT_TENSORS_CLOSE(loss, expected.loss.reshape({1}), 1e-9, 1e-9);
      auto gradient = layer->router().weight.grad();
      if (is_dtensor(gradient)) gradient = DTensor(gradient).full_tensor();
      EXPECT_TENSORS_CLOSE(gradient, expected.router_gradient, 1e-9, 1e-9) << splits_time;
    });
  }
}

TEST(SequenceBalance, IsThatOfOneRankBesideSplitSequences) {
  if (world_size() > 1) return;
  const auto x = draw_input();
  const auto expected = balance_alone(x, 0);
  run_as(2, [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {2}, {"cp"});
    auto layer = make_layer(0);
    expert_parallel(*layer, mesh["cp"], {.tokens = mesh});
    const auto parts = split_sequence({x}, {1}, mesh["cp"]);
    const Tensor leaf = Tensor(parts.tensors[0]).detach().requires_grad_();
    const auto output = layer(leaf);
    EXPECT_TENSORS_CLOSE(merge_sequence(output.detach(), 1), expected.output, 1e-9, 1e-9);
    auto loss = layer->statistics().balance_loss.clone().reshape({1});
    mesh.communicator()->all_reduce(loss, ReduceOp::kAvg, "loss").wait();
    EXPECT_TENSORS_CLOSE(loss, expected.loss.reshape({1}), 1e-9, 1e-9);
    (to_local(output).square().sum() * 2).backward(); // groups average over both ranks
    const auto gradient = layer->router().weight.grad().clone();
    mesh.communicator()->all_reduce(gradient, ReduceOp::kAvg, "gradient").wait();
    EXPECT_TENSORS_CLOSE(gradient, expected.router_gradient, 1e-9, 1e-9);
  });
}

/// Each rank of ep has all experts, and would train them with the others of efsdp alone.
TEST(ExpertsWithoutExpertParallel, AreAnErrorWhereTheyWouldDiffer) {
  if (world_size() > 1) return;
  run_as(4, [&] {
    const auto mesh = init_device_mesh(torch::kCPU, {4}, {"shard"});
    auto layer = make_layer(0);
    fully_shard(*layer->experts(), expert_mesh(mesh, 2)["efsdp"]);
    fully_shard(*layer, mesh);
    EXPECT_THROWS_WITH(layer(draw_input()), "call expert_parallel before fully_shard of the experts");
  });
}

} // namespace
} // namespace tessera::testing::composed::parts_test
