// What a prediction says, where that is known by other means.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tessera/collectives/process_context.h>
#include <tessera/parallel/moe.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/prediction.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>

#include <tessera/tests/plan/models/configs.h>
#include <tessera/tests/plan/test_models.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::prediction_test {
namespace {

using planned::sequence;

constexpr int64_t kWidth = 256, kLayers = 4, kParameters = kLayers * kWidth * kWidth;

PlannedModel linears() {
  const auto make = [] {
    torch::nn::Sequential layers;
    for (int64_t i = 0; i < kLayers; ++i)
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    return layers;
  };
  return sequence("linears", make, {kWidth});
}

Machine cluster(int64_t ranks) {
  Machine machine{.ranks_a_host = ranks};
  machine.memory = int64_t{1} << 34;
  machine.fp32_flops = 1e12;
  machine.bf16_flops = 4e12;
  machine.memory_bandwidth = 1e11;
  machine.in_host = {1e-5, 1e-10};
  return machine;
}

TEST(Prediction, CountsStateOfEachStrategy) {
  constexpr int64_t kRanks = 8, kBytes = 4 * kParameters;
  struct Row {
    tessera::Strategy strategy;
    int64_t parameters, state;
  };
  for (const auto& row :
       {Row{tessera::Strategy::kNoShard, kBytes, 2 * kBytes}, Row{tessera::Strategy::kZero1, kBytes / 8, 2 * kBytes / 8},
        Row{tessera::Strategy::kZero2, kBytes / 8, 2 * kBytes / 8},
        Row{tessera::Strategy::kFullShard, kBytes / 8, 2 * kBytes / 8},
        Row{tessera::Strategy::kHybridShard, kBytes / 4, 2 * kBytes / 4},
        Row{tessera::Strategy::kHierarchical, kBytes / 8, 2 * kBytes / 8}}) {
    PlanSettings settings{.strategy = row.strategy, .precision = PlanPrecision::kFp32};
    const bool has_outer = row_of(row.strategy).outer.has_value();
    if (row.strategy == tessera::Strategy::kNoShard) {
      settings.mesh.replicate = kRanks;
    } else {
      settings.mesh = {.replicate = has_outer ? 2 : 1, .shard = has_outer ? 4 : 8};
    }
    SCOPED_TRACE(settings.to_string());
    const auto prediction = predict(linears(), cluster(kRanks), settings);
    EXPECT_EQ(prediction.parameters, kParameters);
    EXPECT_NEAR(static_cast<double>(prediction.memory.optimizer_state), static_cast<double>(row.state), 0.01 * kBytes);
    if (row.strategy != tessera::Strategy::kHierarchical) // which keeps a gathered part beside them
      EXPECT_NEAR(static_cast<double>(prediction.memory.parameters), static_cast<double>(row.parameters), 0.01 * kBytes);
    EXPECT_EQ(prediction.peak(), std::max({prediction.forward_peak, prediction.backward_peak, prediction.optimizer_peak}));
  }
}

TEST(Prediction, CountsWorkAndTraffic) {
  PlanSettings settings{
      .mesh = {.shard = 4}, .precision = PlanPrecision::kFp32, .rows = 3, .optimizer = "SGD", .max_grad_norm = 0};
  const auto prediction = predict(linears(), cluster(4), settings);
  // Each weight meets each row forward and, but for the gradient of the batch, twice in backward.
  EXPECT_EQ(prediction.flops, 2.0 * 3 * kWidth * kWidth * (3 * kLayers - 1));
  // A gather a layer, and one more of each but the last in backward; a reduction a layer.
  EXPECT_NEAR(static_cast<double>(prediction.bytes_sent), (2.0 * kLayers - 1 + kLayers) * 4 * kWidth * kWidth, 1000)
      << "and which parameters a rank has used";
  EXPECT_NEAR(prediction.seconds, prediction.compute + prediction.exposed, 1e-9);
  EXPECT_EQ(prediction.global_rows(), 12);
  settings.accumulation = 2;
  EXPECT_EQ(predict(linears(), cluster(4), settings).flops, 2 * prediction.flops);
  settings.recompute = true;
  EXPECT_EQ(predict(linears(), cluster(4), settings).flops, 2 * prediction.flops)
      << "the product that ends a part is not repeated";
}

TEST(Prediction, TakesBytesWhereTheyTakeLonger) {
  auto machine = cluster(1);
  const PlanSettings settings{.precision = PlanPrecision::kFp32};
  const auto plain = predict(linears(), machine, settings);
  machine.memory_bandwidth /= 10;
  const auto slow = predict(linears(), machine, settings);
  EXPECT_NEAR(slow.compute / plain.compute, 10, 0.5) << "a row's products are bound by the bytes of the weights";
  machine.launch_seconds = 1e-3;
  EXPECT_GT(predict(linears(), machine, settings).compute, slow.compute + 30e-3) << "some thirty operators and more";
}

TEST(Prediction, OfOffloadLeavesStateOnTheHost) {
  PlanSettings settings{.mesh = {.shard = 2}, .precision = PlanPrecision::kFp32};
  const auto plain = predict(linears(), cluster(2), settings);
  settings.offload = OffloadPolicy::Memory::kHost;
  const auto offloaded = predict(linears(), cluster(2), settings);
  EXPECT_EQ(offloaded.memory.parameters, 0);
  EXPECT_EQ(offloaded.memory.optimizer_state, 0);
  EXPECT_GE(offloaded.host_bytes, 3 * 4 * kParameters / 2);
  EXPECT_LT(offloaded.peak(), plain.peak());
  EXPECT_GT(offloaded.seconds, plain.seconds);
}

TEST(Prediction, OfOffloadInAPipelineLeavesStateOnTheHost) {
  const auto model = planned::transformer("transformer", 251, 64, 4, /*is_tied=*/false);
  PlanSettings settings{.mesh = {.pp = 2, .shard = 2}, .precision = PlanPrecision::kFp32, .rows = 2, .accumulation = 4};
  const auto plain = predict(model, cluster(4), settings);
  settings.offload = OffloadPolicy::Memory::kHost;
  const auto offloaded = predict(model, cluster(4), settings);
  EXPECT_EQ(offloaded.memory.parameters, 0);
  EXPECT_EQ(offloaded.memory.optimizer_state, 0);
  EXPECT_GE(offloaded.host_bytes, plain.memory.parameters + plain.memory.optimizer_state);
  EXPECT_LT(offloaded.peak(), plain.peak());
  EXPECT_GT(offloaded.memory.reduce_buffers, plain.memory.reduce_buffers / 2) << "sums over micro-batches stay on the device";
}

TEST(Prediction, OfSelectiveRecomputationLiesBetween) {
  const auto model = planned::transformer("transformer", 251, 256, 4, /*is_tied=*/false, /*length=*/256);
  PlanSettings settings{.mesh = {.shard = 4}, .rows = 4};
  const auto none = predict(model, cluster(4), settings);
  settings.recompute = true;
  const auto all = predict(model, cluster(4), settings);
  settings.keeps = RecomputeKeeps::kSecondProducts;
  const auto some = predict(model, cluster(4), settings);
  for (const auto member : {&Prediction::flops, &Prediction::seconds}) {
    EXPECT_LT(none.*member, some.*member);
    EXPECT_LT(some.*member, all.*member);
  }
  EXPECT_LT(all.memory.activations, some.memory.activations);
  EXPECT_LT(some.memory.activations, none.memory.activations);
  // Of six products of a block the first, third and fifth are kept; the last is needed by nobody.
  const double tokens = 4 * 256, width = 256, layers = 4;
  EXPECT_NEAR(some.flops - none.flops, layers * 2 * tokens * width * width * 2, 1e-3 * none.flops) << "keys and the projection";
}

TEST(Prediction, OfProductsInFp8TakesTheirRate) {
  const auto model = planned::transformer("transformer", 251, 512, 2, /*is_tied=*/false, /*length=*/512);
  auto machine = cluster(2);
  machine.memory_bandwidth = 1e30;
  PlanSettings settings{.mesh = {.shard = 2}, .rows = 2};
  const auto plain = predict(model, machine, settings);
  settings.float8 = Float8Scaling::kTensor;
  const auto as_bf16 = predict(model, machine, settings);
  EXPECT_NEAR(as_bf16.flops, plain.flops, 1e-6 * plain.flops);
  machine.float8_flops = 2 * (machine.bf16_flops > 0 ? machine.bf16_flops : machine.fp32_flops);
  const auto fast = predict(model, machine, settings);
  const double tokens = 2 * 512, in_fp8 = 2 * 3 * 2 * tokens * 12 * 512 * 512; // the head is not in it
  const double rate = machine.efficiency * machine.float8_flops;
  EXPECT_NEAR(as_bf16.compute - fast.compute, in_fp8 / rate, 0.02 * in_fp8 / rate);
}

TEST(Prediction, KnowsEachOptimizer) {
  const auto state = [](const std::string& name) {
    const PlanSettings settings{.precision = PlanPrecision::kFp32, .optimizer = name};
    return static_cast<double>(predict(linears(), cluster(1), settings).memory.optimizer_state) / kParameters;
  };
  EXPECT_EQ(state("SGD"), 0);
  for (const auto* name : {"Momentum", "Lion", "Muon"}) EXPECT_NEAR(state(name), 4, 0.05) << name;
  for (const auto* name : {"AdamW", "Adam", "Lamb"}) EXPECT_NEAR(state(name), 8, 0.05) << name;
  EXPECT_NEAR(state("AdamW8bit"), 2, 0.1);
  EXPECT_LT(state("Adafactor"), 0.1);
}

TEST(Prediction, OfAPipelineIsItsFullestStage) {
  const auto model = planned::transformer("transformer", 251, 64, 4, /*is_tied=*/false);
  PlanSettings settings{.mesh = {.pp = 2, .shard = 2}, .precision = PlanPrecision::kFp32, .rows = 2, .accumulation = 4};
  const auto pipeline = predict(model, cluster(4), settings);
  EXPECT_GT(pipeline.seconds, 0);
  EXPECT_GT(pipeline.exposed, 0) << "the pipeline fills and drains";
  settings.mesh = {.shard = 4};
  const auto flat = predict(model, cluster(4), settings);
  EXPECT_EQ(pipeline.parameters, flat.parameters);
  EXPECT_NEAR(static_cast<double>(pipeline.memory.optimizer_state) / static_cast<double>(flat.memory.optimizer_state), 1, 0.35)
      << "half of the layers, over half of the ranks";
}

/// Two mixtures of experts.
PlannedModel mixture() {
  PlannedModel model{.name = "mixture", .experts = 4};
  model.build = [] {
    torch::nn::ModuleList layers;
    for (int i = 0; i < 2; ++i) layers->push_back(MoE(MoEOptions{.width = 64, .hidden = 64, .experts = 4}));
    return layers.ptr();
  };
  model.groups = {"*"};
  model.batch = [](const PassSettings& pass, at::Device device) {
    return PipelineValue(torch::zeros({pass.rows, 8, 64}, torch::TensorOptions().device(device)));
  };
  model.loss = [](torch::nn::Module& module, const PipelineValue& batch, const PassSettings&) {
    auto x = batch.toTensor();
    for (const auto& each : module.children()) x = each->as<MoEImpl>()->forward(x);
    return x.square().mean();
  };
  model.layers = [](torch::nn::Module& module, const PassSettings&) {
    PipelineLayers layers(module);
    for (const auto& each : module.named_children()) {
      auto* const layer = each.value()->as<MoEImpl>();
      layers.add(each.key(), {each.key()}, [layer](const torch::Tensor& x) { return layer->forward(x); });
    }
    return layers;
  };
  model.pipeline_loss.sum = [](const PipelineValue& output, const PipelineValue&) { return output.toTensor().square().sum(); };
  return model;
}

/// Predictions of experts that lie together on each rank, and of ones that two ranks split.
std::pair<Prediction, Prediction> together_and_apart(PlanSettings settings) {
  const auto together = predict(mixture(), cluster(4), settings);
  settings.mesh.ep = 2;
  const auto apart = predict(mixture(), cluster(4), settings);
  EXPECT_EQ(apart.parameters, together.parameters);
  EXPECT_NEAR(static_cast<double>(apart.memory.optimizer_state) / static_cast<double>(together.memory.optimizer_state), 1, 0.1);
  EXPECT_GT(apart.collectives, together.collectives) << "tokens go to experts and come back";
  return {together, apart};
}

TEST(Prediction, OfExpertsThatAreSplit) { together_and_apart({.mesh = {.shard = 4}, .precision = PlanPrecision::kFp32}); }

TEST(Prediction, OfExpertsThatAreSplitInAPipeline) {
  const auto [together, apart] =
      together_and_apart({.mesh = {.pp = 2, .shard = 2}, .precision = PlanPrecision::kFp32, .rows = 2, .accumulation = 4});
  EXPECT_LT(apart.memory.unsharded, together.memory.unsharded) << "a rank gathers its own experts alone";
}

TEST(Prediction, LeavesTheProcessGroupAlone) {
  if (is_initialized()) destroy_process_group();
  predict(linears(), cluster(4), {.mesh = {.shard = 4}});
  EXPECT_FALSE(is_initialized());
  init_process_group();
  predict(linears(), cluster(4), {.mesh = {.shard = 4}});
  EXPECT_EQ(process_context().world_size(), 1);
  EXPECT_EQ(process_context().simulated_clock(), nullptr);
}

TEST(Prediction, IsTheSameTwice) {
  const PlanSettings settings{.mesh = {.shard = 4}, .rows = 2, .recompute = true};
  EXPECT_EQ(predict(linears(), cluster(4), settings).to_json(), predict(linears(), cluster(4), settings).to_json());
}

TEST(Prediction, IsWritten) {
  const auto prediction = predict(linears(), cluster(4), {.mesh = {.shard = 4}});
  const auto json = nlohmann::json::parse(prediction.to_json());
  EXPECT_EQ(json["format"], "tessera prediction");
  EXPECT_EQ(json["peak"], prediction.peak());
  EXPECT_EQ(json["settings"]["mesh"]["shard"], 4);
  EXPECT_THAT(prediction.to_string(), ::testing::HasSubstr("optimizer state"));
}

/// With c ranks the last of contiguous parts has c - ½ blocks of causal attention to compute, where each rank of the others has
/// c / 2.
TEST(Prediction, OfContiguousSequencesIsThatOfTheLastRank) {
  const TemporaryFolder folder;
  folder.write("config.json", configs::llama(64, 96, 2, 4, 4, 101).dump());
  const auto excess = [&](int64_t ranks) {
    const auto model = read_model(folder.path(), {.sequence = 1024 * ranks});
    PlanSettings settings{.mesh = {.cp = ranks}};
    const auto balanced = predict(model, cluster(ranks), settings);
    settings.context_order = PartOrder::kContiguous;
    const auto contiguous = predict(model, cluster(ranks), settings);
    EXPECT_GT(contiguous.seconds, balanced.seconds) << ranks;
    return contiguous.flops - balanced.flops;
  };
  const double two = excess(2), four = excess(4);
  EXPECT_GT(two, 0);
  EXPECT_NEAR(four / two, 3, 0.1);
  const auto model = read_model(folder.path(), {.sequence = 2048});
  PlanSettings settings{.mesh = {.pp = 2, .cp = 2}, .accumulation = 2};
  const auto balanced = predict(model, cluster(4), settings);
  settings.context_order = PartOrder::kContiguous;
  EXPECT_GT(predict(model, cluster(4), settings).seconds, balanced.seconds);
}

TEST(Prediction, RefusesWhatCannotBe) {
  const auto refuse = [](const PlanSettings& settings) { predict(linears(), cluster(4), settings); };
  EXPECT_THROWS_WITH(refuse({.mesh = {.shard = 2}}), "the mesh has 2 ranks, but the machine has 4");
  EXPECT_THROWS_WITH(refuse({.mesh = {.shard = 2, .tp = 2}}), "linears cannot be tensor parallel, but tp is 2");
  EXPECT_THROWS_WITH(refuse({.mesh = {.shard = 2, .cp = 2}}), "linears does not split its sequences, but cp is 2");
  EXPECT_THROWS_WITH(refuse({.mesh = {.pp = 2, .shard = 2}}), "linears has no layers for a pipeline, but pp is 2");
  EXPECT_THROWS_WITH(refuse({.mesh = {.shard = 4, .ep = 2}}), "linears has no experts, but ep is 2");
  EXPECT_THROWS_WITH(predict({.name = "nothing"}, cluster(1), {}), "nothing lacks a function");
}

} // namespace
} // namespace tessera::testing::prediction_test
