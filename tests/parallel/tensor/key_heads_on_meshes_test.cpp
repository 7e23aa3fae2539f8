// Key heads in groups of ranks on a mesh with other dims: sharded, in a pipeline, beside parts of sequences, and in checkpoints.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/tensor/key_heads_net.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::testing::key_heads_on_meshes_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using namespace key_heads; // NOLINT(google-build-using-namespace)

struct Sharding {
  NetOptions net;
  bool is_sequence = false;
  FullyShardOptions options = {};
  double bound = kBound;
};

/// On dp x tp ranks, beside one process.
void compare_sharded(Net& net, const std::vector<int64_t>& shape, const Sharding& sharding, const Trained& expected) {
  const auto mesh = init_device_mesh(test_device_type(), shape, {"dp", "tp"});
  parallelize(*net, mesh["tp"], plan_of(sharding.net, sharding.is_sequence));
  for (auto& block : net->blocks) fully_shard(*block, mesh["dp"], sharding.options);
  fully_shard(*net, mesh["dp"], sharding.options);
  auto trained = train(net, mesh.local_rank("dp"), shape[0], static_cast<int64_t>(expected.losses.size()));
  auto losses = torch::tensor(trained.losses, torch::kDouble);
  mesh["dp"].communicator()->all_reduce(losses, ReduceOp::kSum, "losses").wait();
  losses /= shape[0];
  for (size_t i = 0; i < trained.losses.size(); ++i) trained.losses[i] = losses[static_cast<int64_t>(i)].item<double>();
  expect_same(trained, expected, sharding.bound);
  const auto& tokens = tokens_of(0);
  const auto loss = loss_of(net, tokens).item<double>();
  const torch::NoGradGuard no_grad;
  EXPECT_NEAR(loss_of(net, tokens).item<double>(), loss, 1e-6);
}

std::vector<Sharding> shardings() {
  std::vector<Sharding> all;
  for (const int64_t heads : {1, 2}) {
    for (const bool is_sequence : {false, true}) {
      for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
        FullyShardOptions options;
        options.layout = layout;
        all.push_back({{.key_heads = heads, .has_bias = true, .has_key_norm = true}, is_sequence, options});
        all.push_back({{.key_heads = heads, .recomputes = true}, is_sequence, options});
      }
    }
  }
  return all;
}

TEST(KeyHeadsOnMeshes, AreShardedFurther) {
  const auto world = world_size();
  for (const auto& sharding : sweep(shardings(), 2, [](const auto& each) { return each.is_sequence; })) {
    auto twin = seeded(sharding.net);
    const auto expected = train(twin);
    for (int64_t tensor_ranks = 1; tensor_ranks <= world; ++tensor_ranks) {
      if (world % tensor_ranks != 0) continue;
      SCOPED_TRACE(c10::str(sharding.net.text(), sharding.is_sequence ? ", sequence" : "", ", tp ", tensor_ranks));
      auto net = seeded(sharding.net);
      compare_sharded(net, {world / tensor_ranks, tensor_ranks}, sharding, expected);
    }
  }
}

/// Products in fp8 have the scales of a data rank's whole tensors, also where a group has some rows of a weight. A number that
/// lies between two codes gets either one where its sum comes in another order: 1/16 of it, or of a gradient 1/8.
TEST(KeyHeadsOnMeshes, MultiplyInFloat8) {
  const auto world = world_size();
  for (const auto scaling : {Float8Scaling::kTensor, Float8Scaling::kRows}) {
    for (const auto& [heads, recomputes] : std::vector<std::pair<int64_t, bool>>{{1, true}, {2, false}, {3, false}, {6, true}}) {
      const bool is_sequence = heads > 1;
      Sharding sharding{{.key_heads = heads, .has_bias = true, .recomputes = recomputes, .float8 = scaling}, is_sequence};
      sharding.bound = 2e-3;
      for (int64_t tensor_ranks = 1; tensor_ranks <= world; ++tensor_ranks) {
        if (world % tensor_ranks != 0) continue;
        SCOPED_TRACE(c10::str(sharding.net.text(), is_sequence ? ", sequence" : "", ", tp ", tensor_ranks));
        auto net = seeded(sharding.net), twin = seeded(sharding.net);
        const auto expected = train(twin, 0, 1, 3, world / tensor_ranks);
        compare_sharded(net, {world / tensor_ranks, tensor_ranks}, sharding, expected);
      }
    }
  }
}

/// dp 2 x tp 4, as threads of this process.
TEST(KeyHeadsOnMeshes, AreShardedOnEightRanks) {
  if (world_size() > 1) return;
  for (const auto& sharding : sweep(shardings(), 2, [](const auto& each) { return each.net.key_heads == 2; })) {
    SCOPED_TRACE(c10::str(sharding.net.text(), sharding.is_sequence ? ", sequence" : ""));
    auto twin = seeded(sharding.net);
    const auto expected = train(twin, 0, 1, 5);
    std::vector<Net> nets; // which threads would draw from one generator
    for (int i = 0; i < 8; ++i) nets.push_back(seeded(sharding.net));
    run_ranks_as_threads(8, [&] { compare_sharded(nets[static_cast<size_t>(world_rank())], {2, 4}, sharding, expected); });
  }
}

/// Queries that no line of a plan splits see whole keys, beside parts of sequences too.
TEST(KeyHeadsOnMeshes, AreWholeBesideWholeQueries) {
  if (world_size() != 4) GTEST_SKIP() << "two groups of two ranks";
  auto twin = seeded({.key_heads = 2})->blocks[0], block = seeded({.key_heads = 2})->blocks[0];
  const auto mesh = init_device_mesh(test_device_type(), {1, 4}, {"cp", "tp"});
  parallelize(*block, mesh["tp"], {{"[kv]", KeyHeads{2}}});
  torch::manual_seed(8);
  const auto x = torch::randn({kRows, kTime, kWidth});
  for (const bool is_in_scope : {false, true}) {
    std::optional<ContextParallelScope> scope;
    if (is_in_scope) scope.emplace(ContextParallel::kAllGather, split_sequence({x}, {1}, mesh["cp"]).mesh);
    for (auto* each : {&twin, &block}) (*each)->zero_grad();
    const auto mixed = block->mix(x);
    scope.reset();
    const auto expected = twin->mix(x);
    EXPECT_TENSORS_CLOSE(whole_of(mixed), expected.detach(), 1e-5, 1e-5);
    mixed.square().sum().backward();
    expected.square().sum().backward();
    for (const bool is_key : {false, true}) {
      const auto &got = is_key ? block->k : block->v, &wanted = is_key ? twin->k : twin->v;
      EXPECT_TENSORS_CLOSE(whole_of(got->weight.grad()), wanted->weight.grad(), 1e-4, 1e-4);
    }
  }
}

/// cp 2 x tp 4, as threads of this process: each rank exchanges the keys of its own queries.
TEST(KeyHeadsOnMeshes, AreComputedBesideSplitSequences) {
  if (world_size() > 1) return;
  constexpr int64_t kSteps = 5;
  for (const auto scheme : {ContextParallel::kAllGather, ContextParallel::kRing}) {
    for (const bool is_sequence : {false, true}) {
      const NetOptions options{.key_heads = 2, .has_bias = true, .has_key_norm = true};
      SCOPED_TRACE(c10::str(to_string(scheme), is_sequence ? ", sequence" : ""));
      auto twin = seeded(options);
      const auto expected = train(twin, 0, 1, kSteps);
      std::vector<Net> nets; // which threads would draw from one generator
      for (int i = 0; i < 8; ++i) nets.push_back(seeded(options));
      run_ranks_as_threads(8, [&] {
        auto& net = nets[static_cast<size_t>(world_rank())];
        const auto mesh = init_device_mesh(test_device_type(), {2, 4}, {"cp", "tp"});
        parallelize(*net, mesh["tp"], plan_of(options, is_sequence));
        fully_shard(*net, mesh["cp"]).set_gradient_divide_factor(1);
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
        for (int64_t step = 0; step < kSteps; ++step) {
          const auto& all = tokens_of(step);
          const auto parts = split_sequence({all.inputs, all.targets}, {1, 1}, mesh["cp"]);
          const ContextParallelScope scope(scheme, parts.mesh);
          optimizer.zero_grad();
          const auto logits = net(parts.tensors[0].local());
          const auto loss =
              torch::cross_entropy_loss(logits.flatten(0, 1), parts.tensors[1].local().flatten(), {}, at::Reduction::Sum) /
              (kRows * kTime);
          loss.backward();
          EXPECT_NEAR(clip_grad_norm_(*net, 0.5).item<double>(), expected.norms[static_cast<size_t>(step)], kBound) << step;
          optimizer.step();
        }
        const auto parameters = net->parameters();
        for (size_t i = 0; i < parameters.size(); ++i)
          EXPECT_LE((whole_of(parameters[i]) - expected.weights[i]).abs().max().item<double>(), kBound) << i;
      });
    }
  }
}

using Batch = std::tuple<Tensor, Tensor>;

/// The micro-batches of each step.
std::vector<std::vector<PipelineValue>> batches_of(int64_t steps) {
  constexpr int64_t kBatches = 4;
  std::vector<std::vector<PipelineValue>> all;
  for (int64_t step = 0; step < steps; ++step) {
    const auto inputs = tokens_of(step).inputs.chunk(kBatches), targets = tokens_of(step).targets.chunk(kBatches);
    auto& batches = all.emplace_back();
    for (size_t i = 0; i < inputs.size(); ++i) batches.emplace_back(Batch(inputs[i], targets[i]));
  }
  return all;
}

PipelineStages stages_of(NetImpl* net, const DeviceMesh& mesh, bool is_sequence) {
  PipelineLayers layers(*net);
  layers.add("embed", {"table"}, [net](const Batch& batch) { return net->table(std::get<0>(batch)); });
  layers.add("first", {"first"}, [net](const Tensor& x) { return net->blocks[0](x); });
  layers.add("second", {"second"}, [net](const Tensor& x) { return net->blocks[1](x); });
  layers.add("head", {"table.weight"}, [net](const Tensor& x) { return torch::linear(x, net->table->weight); });
  layers.tie("table.weight");
  auto stages = split(layers, mesh["pp"]);
  parallelize(stages, mesh["tp"], plan_of(net->options, is_sequence));
  return stages;
}

void compare_in_pipeline(NetImpl* net, PipelineScheduleKind kind, bool is_sequence, const Trained& expected) {
  const auto mesh = init_device_mesh(test_device_type(), {2, 4}, {"pp", "tp"});
  const auto stages = stages_of(net, mesh, is_sequence);
  const PipelineLoss loss{.sum = [](const PipelineValue& logits, const PipelineValue& batch) {
    return torch::cross_entropy_loss(logits.toTensor().flatten(0, 1), std::get<1>(batch.to<Batch>()).flatten());
  }};
  Pipeline pipeline(stages, kind, loss);
  torch::optim::SGD optimizer(stages.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  const auto steps = batches_of(static_cast<int64_t>(expected.losses.size()));
  for (size_t step = 0; step < steps.size(); ++step) {
    optimizer.zero_grad();
    EXPECT_NEAR(pipeline.step(steps[step]).item<double>(), expected.losses[step], kBound) << "step " << step;
    EXPECT_NEAR(clip_grad_norm_(stages, 0.5).item<double>(), expected.norms[step], kBound) << "step " << step;
    optimizer.step();
  }
}

/// pp 2 x tp 4, as threads of this process, with backwards in two halves.
TEST(KeyHeadsOnMeshes, AreStagesOfAPipeline) {
  if (world_size() > 1) return;
  const NetOptions options{.key_heads = 2, .has_bias = true, .has_key_norm = true};
  auto twin = seeded(options);
  const auto expected = train(twin, 0, 1, 4);
  const auto weights = twin->named_parameters();
  for (const auto kind : {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kZeroBubbleH1}) {
    for (const bool is_sequence : {false, true}) {
      SCOPED_TRACE(c10::str("kind ", static_cast<int>(kind), is_sequence ? ", sequence" : ""));
      std::vector<Net> nets; // which threads would draw from one generator
      for (int i = 0; i < 8; ++i) nets.push_back(seeded(options));
      run_ranks_as_threads(8, [&] {
        auto& net = nets[static_cast<size_t>(world_rank())];
        compare_in_pipeline(net.get(), kind, is_sequence, expected);
        for (const auto& item : net->named_parameters()) {
          if (item.value().is_meta()) continue; // of the other stage
          EXPECT_LE((whole_of(item.value()) - weights[item.key()].detach()).abs().max().item<double>(), kBound) << item.key();
        }
      });
    }
  }
}

/// Weights without memory that are split first are those of one process, and are in a checkpoint once.
TEST(KeyHeadsOnMeshes, AreInACheckpointOnce) {
  const SharedFolder folder;
  const NetOptions options{.key_heads = 2, .has_bias = true};
  const auto init = [](nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.uniform_(-0.1, 0.1);
  };
  auto net = on_meta([&] { return Net(options); }), twin = on_meta([&] { return Net(options); });
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "tp"});
  parallelize(*net, mesh["tp"], plan_of(options, /*is_sequence=*/false));
  fully_shard(*net, mesh["dp"]);
  for (auto* each : {&net, &twin}) {
    torch::manual_seed(41);
    EXPECT_TRUE(materialize(**each, init).empty());
  }
  const auto& tokens = tokens_of(0);
  EXPECT_NEAR(loss_of(net, tokens).item<double>(), loss_of(twin, tokens).item<double>(), kBound);
  checkpoint::save(state_dict(*net), folder.path() / "net");
  auto loaded = seeded(options);
  fully_shard(*loaded, tensor_mesh());
  checkpoint::load(state_dict(*loaded), folder.path() / "net");
  const auto expected = twin->named_parameters();
  for (const auto& item : loaded->named_parameters())
    EXPECT_TENSORS_EQUAL(whole_of(item.value()), expected[item.key()].detach()) << item.key();
  auto again = seeded(options);
  parallelize(*again, tensor_mesh(), plan_of(options, /*is_sequence=*/true));
  checkpoint::load(state_dict(*again), folder.path() / "net");
  EXPECT_NEAR(loss_of(again, tokens).item<double>(), loss_of(twin, tokens).item<double>(), kBound);
  const torch::InferenceMode inference;
  EXPECT_NEAR(loss_of(again, tokens).item<double>(), loss_of(twin, tokens).item<double>(), kBound) << "in InferenceMode";
}

TEST(KeyHeadsOnMeshes, ComputeInParamDtype) {
  const NetOptions options{.key_heads = 2, .has_bias = true, .has_key_norm = true};
  auto twin = seeded(options), net = seeded(options);
  const auto mesh = init_device_mesh(test_device_type(), {1, world_size()}, {"dp", "tp"});
  parallelize(*net, mesh["tp"], plan_of(options, /*is_sequence=*/true));
  FullyShardOptions sharding;
  sharding.mixed_precision.param_dtype = torch::kDouble;
  sharding.mixed_precision.reduce_dtype = torch::kDouble;
  fully_shard(*net, mesh["dp"], sharding);
  twin->to(torch::kDouble);
  const auto& tokens = tokens_of(0);
  loss_of(net, tokens).backward();
  loss_of(twin, tokens).backward();
  const auto expected = twin->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TENSORS_CLOSE(whole_of(item.value().grad()), expected[item.key()].grad().to(torch::kFloat), 1e-5, 1e-8) << item.key();
}

} // namespace
} // namespace tessera::testing::key_heads_on_meshes_test
