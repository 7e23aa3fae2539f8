// Experts in the stages of a pipeline, and beside split sequences.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/collectives/run_ranks.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/parallel/experts/mixture_training.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::experts_pipeline_test {
namespace {

using torch::Tensor;
using Pair = std::tuple<Tensor, Tensor>; // inputs and targets

PipelineLayers layers_of(Mixture& model) {
  auto* const net = model.get();
  PipelineLayers layers(*model);
  layers.add("stem", {"stem"}, [net](const Pair& batch) { return net->stem(std::get<0>(batch)); });
  layers.add("first", {"first"}, [net](const Tensor& x) { return x + net->layer(net->first, x); });
  layers.add("middle", {"up", "down"}, [net](const Tensor& x) { return x + net->down(torch::gelu(net->up(x))); });
  layers.add("second", {"norm", "second"}, [net](const Tensor& x) { return x + net->layer(net->second, net->norm(x)); });
  layers.add("head", {"head"}, [net](const Tensor& x) { return net->head(x); });
  return layers;
}

PipelineLoss squared_error() {
  return {.sum = [](const PipelineValue& output,
                    const PipelineValue& batch) { return (output.toTensor() - std::get<1>(batch.to<Pair>())).square().sum(); },
          .count = [](const PipelineValue& batch) { return static_cast<double>(std::get<1>(batch.to<Pair>()).numel()); }};
}

/// The loss of a step that is accumulated over two halves of its micro-batches.
double step_in_two(Pipeline& pipeline, const std::vector<PipelineValue>& micro_batches, const MixtureBatch& batch) {
  const auto middle = micro_batches.begin() + std::ssize(micro_batches) / 2;
  const auto count = static_cast<double>(batch.targets.numel());
  const auto first = pipeline.step({micro_batches.begin(), middle}, {.is_last = false, .count = count});
  return (first + pipeline.step({middle, micro_batches.end()}, {.count = count})).item<double>();
}

/// pp × replicate × shard × tp, the experts on `experts` ranks of a stage.
MixtureResult train_in_pipeline(Mixture model, const MixtureCase& plan, PipelineScheduleKind kind, bool accumulates = false) {
  const auto mesh =
      init_device_mesh(torch::kCPU, {2, plan.replicas, plan.shards, plan.tensor}, {"pp", "replicate", "shard", "tp"});
  const auto of_stage = mesh[{"replicate", "shard", "tp"}];
  const auto experts = expert_mesh(mesh[{"shard", "tp"}], plan.experts);
  const auto data = mesh[{"replicate", "shard"}];
  model->recomputes = plan.recomputes;
  auto stages = split(layers_of(model), mesh["pp"], {.bounds = {2}});
  expert_parallel(*stages.module, experts["ep"],
                  {.tokens = of_stage, .tensor_parallel = plan.tensor > 1 ? mesh["tp"] : DeviceMesh()});
  if (plan.tensor > 1) parallelize(stages, mesh["tp"], {{"up", Colwise{}}, {"down", Rowwise{}}});
  for (auto* layer : moe_layers(*stages.module))
    fully_shard(*layer->experts(), DeviceMesh::concatenate({mesh["replicate"], experts["efsdp"]}));
  fully_shard(stages, data);
  set_router_loss_scale(*stages.module, 1.0 / static_cast<double>(plan.micro_batches));
  Pipeline pipeline(stages, kind, squared_error(), {.data_mesh = data});
  torch::optim::SGD optimizer(stages.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  MixtureResult result;
  const auto data_rank = data.local_rank(0) * plan.shards + data.local_rank(1), parts = plan.data_ranks() * plan.micro_batches;
  for (int64_t step = 0; step < plan.steps; ++step) {
    const MixtureBatch batch(step);
    std::vector<PipelineValue> micro_batches;
    for (int64_t i = 0; i < plan.micro_batches; ++i) {
      const auto own = static_cast<size_t>(i * plan.data_ranks() + data_rank);
      micro_batches.emplace_back(Pair(batch.inputs.tensor_split(parts)[own], batch.targets.tensor_split(parts)[own]));
    }
    optimizer.zero_grad();
    result.losses.push_back(accumulates ? step_in_two(pipeline, micro_batches, batch)
                                        : pipeline.step(micro_batches).item<double>());
    update_expert_bias(*stages.module);
    result.norms.push_back(clip_grad_norm_(stages, 0.5).item<double>());
    optimizer.step();
  }
  result.weights = whole_weights(*stages.module);
  return result;
}

void expect_same(const MixtureResult& got, const MixtureResult& expected) {
  for (size_t i = 0; i < got.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-5) << "loss of step " << i;
    EXPECT_NEAR(got.norms[i], expected.norms[i], 1e-5) << "norm of step " << i;
  }
  EXPECT_GT(got.weights.size(), 5U);
  for (const auto& [name, weights] : got.weights) EXPECT_TENSORS_CLOSE(weights, expected.weights.at(name), 1e-5, 1e-5) << name;
}

MoEOptions options_with(ExpertStorage storage) {
  auto options = mixture_options();
  options.storage = storage;
  return options;
}

void compare(MixtureCase plan, PipelineScheduleKind kind, bool accumulates = false) {
  for (const auto storage : {ExpertStorage::kStacked, ExpertStorage::kModules}) {
    const auto options = options_with(storage);
    SCOPED_TRACE(c10::str(plan.text(), " kind ", static_cast<int>(kind)));
    const auto expected = train_mixture_alone(options, plan);
    const auto ranks = static_cast<int>(2 * plan.ranks());
    if (world_size() == ranks) expect_same(train_in_pipeline(seeded_mixture(options), plan, kind, accumulates), expected);
    if (world_size() > 1) continue;
    std::vector<Mixture> models; // which threads would draw from one generator
    for (int i = 0; i < ranks; ++i) models.push_back(seeded_mixture(options));
    run_ranks_as_threads(ranks, [&] {
      expect_same(train_in_pipeline(models[static_cast<size_t>(world_rank())], plan, kind, accumulates), expected);
    });
  }
}

/// On 4 ranks, and on 4 and 8 threads of one.
TEST(ExpertsInPipelines, TrainAsOnOneRank) {
  if (world_size() != 1 && world_size() != 4) return;
  using enum PipelineScheduleKind;
  for (const auto kind : {kGPipe, k1F1B, kZeroBubbleH1}) {
    for (const bool recomputes : {false, true}) {
      compare({.shards = 2, .experts = 2, .recomputes = recomputes, .micro_batches = 3, .steps = 5}, kind);
      compare({.tensor = 2, .experts = 2, .recomputes = recomputes, .micro_batches = 2, .steps = 3}, kind);
    }
  }
}

TEST(ExpertsInPipelines, Accumulate) {
  if (world_size() != 1 && world_size() != 4) return;
  for (const auto kind : {PipelineScheduleKind::k1F1B, PipelineScheduleKind::kZeroBubbleH1})
    compare({.shards = 2, .experts = 2, .micro_batches = 4, .steps = 3}, kind, /*accumulates=*/true);
}

TEST(ExpertsInPipelines, TrainInFourDimensions) {
  if (world_size() != 1) return;
  using enum PipelineScheduleKind;
  for (const auto kind : sweep(std::vector{k1F1B, kZeroBubbleH1}, 1)) {
    for (const int64_t experts : {2, 4}) {
      compare({.shards = 2, .tensor = 2, .experts = experts, .micro_batches = 2, .steps = 3}, kind);
      if (experts == 2)
        compare({.replicas = 2, .shards = 2, .experts = 2, .recomputes = true, .micro_batches = 2, .steps = 3}, kind);
    }
    compare({.replicas = 2, .tensor = 2, .experts = 2, .micro_batches = 2, .steps = 3}, kind);
  }
}

/// Parts of sequences: the ranks of cp have tokens of their own.
TEST(ExpertsBesideSplitSequences, TrainAsOnOneRank) {
  if (world_size() != 2 && world_size() != 4) return;
  const auto mesh = init_device_mesh(torch::kCPU, {world_size() / 2, 2}, {"shard", "cp"});
  for (const auto experts : {int64_t{2}, world_size()}) {
    const auto options = mixture_options();
    const MixtureCase plan{.steps = 6};
    const auto expected = train_mixture_alone(options, plan);
    auto model = seeded_mixture(options);
    const auto flat = mesh.flatten("shard_cp"), same = expert_mesh(mesh, experts);
    expert_parallel(*model, same["ep"], {.tokens = mesh});
    for (auto* layer : moe_layers(*model)) fully_shard(*layer->experts(), same["efsdp"]);
    fully_shard(*model, flat);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    for (int64_t step = 0; step < plan.steps; ++step) {
      const MixtureBatch batch(step);
      const auto own = static_cast<size_t>(mesh.local_rank("shard"));
      const auto parts = split_sequence(
          {batch.inputs.tensor_split(mesh.size(0))[own], batch.targets.tensor_split(mesh.size(0))[own]}, {1, 1}, mesh["cp"]);
      optimizer.zero_grad();
      const auto loss = (to_local(model(parts.tensors[0])) - parts.tensors[1].local()).square().mean();
      loss.backward();
      update_expert_bias(*model);
      EXPECT_NEAR(clip_grad_norm_(*model, 0.5).item<double>(), expected.norms[static_cast<size_t>(step)], 1e-5);
      optimizer.step();
    }
    const torch::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters())
      EXPECT_TENSORS_CLOSE(DTensor(item.value().detach()).full_tensor(), expected.weights.at(item.key()), 1e-5, 1e-5)
          << item.key();
  }
}

} // namespace
} // namespace tessera::testing::experts_pipeline_test
