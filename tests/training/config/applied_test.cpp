// What a config makes of a model on the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/debug.h>
#include <tessera/fsdp/explain.h>
#include <tessera/optim/step.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/plan_for.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/training/train_config.h>
#include <tessera/training/train_main.h>

namespace tessera::testing::applied_test {
namespace {

TrainConfig parse(const std::string& keys) {
  return TrainConfig::parse(R"({"train_micro_batch_size_per_gpu": 3, )" + keys + "}", {.ranks = world_size()});
}

/// A model in bf16, as a checkpoint has it, under a config.
struct Trained {
  explicit Trained(const TrainConfig& config) : net(make_net()) {
    net->to(torch::kBFloat16);
    config.set_dtype(*net);
    mesh = config.shard_mesh(config.make_mesh(test_device_type()));
    const auto options = config.shard_options();
    for (auto& block : *net->blocks) fully_shard(*block, mesh, options);
    fully_shard(*net, mesh, options);
    optimizer = config.make_optimizer(*net);
    schedule = config.make_schedule(*optimizer);
  }
  torch::Tensor step(int64_t number) {
    optimizer->zero_grad();
    const auto loss = loss_of(net, own_batch(number));
    loss.backward();
    tessera::step(*optimizer);
    if (schedule) schedule->step();
    return loss;
  }
  Net net;
  DeviceMesh mesh;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<torch::optim::LRScheduler> schedule;
};

/// The dtypes of a training, in the words of docs/from_deepspeed.md.
struct Dtypes {
  c10::ScalarType parameters, forward, reduction, gradients, states;
};

void expect_dtypes(const std::string& keys, const Dtypes& expected) {
  SCOPED_TRACE(keys);
  const auto config = parse(keys + R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}})");
  Trained trained(config);
  EXPECT_EQ(trained.step(0).scalar_type(), expected.forward);
  int64_t elements = 0;
  for (const auto& parameter : trained.net->parameters()) {
    EXPECT_EQ(parameter.scalar_type(), expected.parameters);
    EXPECT_EQ(parameter.grad().scalar_type(), expected.gradients);
    elements += parameter.numel();
    const auto& state =
        static_cast<const torch::optim::AdamWParamState&>(*trained.optimizer->state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().scalar_type(), expected.states);
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), expected.states);
  }
  if (world_size() == 1) return; // nothing is reduced
  int64_t bytes = 0;
  for (const auto& group : explain(*trained.net).groups) bytes += group.reduce_bytes;
  const auto size = static_cast<double>(bytes) / static_cast<double>(elements); // and a little padding
  EXPECT_NEAR(size, static_cast<double>(c10::elementSize(expected.reduction)), 0.3);
}

TEST(AppliedConfig, EachTensorHasTheDtypeOfThePrecision) {
  const auto bf16 = torch::kBFloat16, fp32 = torch::kFloat, half = torch::kHalf;
  for (const std::string stage : {"2", "3"}) {
    const auto zero = R"(, "zero_optimization": {"stage": )" + stage + "}";
    expect_dtypes(R"("tessera": {"precision": "bf16_full"})" + zero, {bf16, bf16, bf16, bf16, bf16});
    expect_dtypes(R"("tessera": {"precision": "bf16_mixed"})" + zero, {fp32, bf16, fp32, fp32, fp32});
    expect_dtypes(R"("tessera": {"precision": "deepspeed"})" + zero, {fp32, bf16, bf16, fp32, fp32});
    expect_dtypes(R"("bf16": {"enabled": true})" + zero, {fp32, bf16, bf16, fp32, fp32});
    expect_dtypes(R"("bf16": {"enabled": true}, "communication_data_type": "fp32")" + zero, {fp32, bf16, fp32, fp32, fp32});
    expect_dtypes(R"("fp16": {"enabled": true})" + zero, {fp32, half, half, fp32, fp32});
  }
}

TEST(AppliedConfig, SetsNothingWithoutAPrecision) {
  expect_dtypes(R"("zero_optimization": {"stage": 3})",
                {torch::kBFloat16, torch::kBFloat16, torch::kBFloat16, torch::kBFloat16, torch::kBFloat16});
}

std::vector<double> losses_under(const std::string& keys) {
  Trained trained(parse(keys + R"(, "optimizer": {"type": "Adam", "params": {"lr": 0.02}}, "tessera": {"precision": "bf16_mixed"},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}})"));
  std::vector<double> losses;
  for (int64_t step = 0; step < 6; ++step) {
    auto loss = trained.step(step).detach().to(torch::kDouble);
    process_context()
        .communicator(trained.mesh.ranks(), test_device_type(), "test")
        ->all_reduce(loss, ReduceOp::kSum, "loss")
        .wait();
    losses.push_back(loss.item<double>() / static_cast<double>(world_size()));
  }
  return losses;
}

TEST(AppliedConfig, AllStagesTrainAlike) {
  const auto whole = losses_under(R"("zero_optimization": {"stage": 0})");
  EXPECT_LT(whole.back(), whole.front() - 0.05);
  std::vector<std::string> others{
      R"("zero_optimization": {"stage": 1})", R"("zero_optimization": {"stage": 2})",
      R"("zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}})"};
  if (world_size() == 4) others.emplace_back(R"("zero_optimization": {"stage": 3, "mics_shard_size": 2})");
  if (world_size() == 4) others.emplace_back(R"("zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2})");
  others.emplace_back(R"("zero_optimization": {"stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": true})");
  for (const auto& keys : others) {
    SCOPED_TRACE(keys);
    EXPECT_THAT(losses_under(keys), ::testing::Pointwise(::testing::DoubleNear(1e-2), whole));
  }
}

TEST(AppliedConfig, MeshesKeepTheirDims) {
  if (world_size() != 4) return;
  const auto dims = [](const std::string& keys) {
    const auto config = parse(keys);
    const auto mesh = config.make_mesh(test_device_type());
    const auto options = config.trainer_options(mesh);
    EXPECT_EQ(options.mesh, mesh);
    const auto gradients = config.shard_mesh(mesh); // averaged over the ranks whose losses add up
    EXPECT_EQ(options.data_mesh.size(), gradients.size());
    return std::make_tuple(mesh.dim_names(), gradients.shape(), config.data_mesh(mesh).size());
  };
  using Names = std::vector<std::string>;
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(dims(R"("tessera": {"mesh": {"cp": 2}}, "zero_optimization": {"stage": 3})"),
            std::make_tuple(Names({"shard", "cp"}), Shape({4}), 2));
  EXPECT_EQ(dims(R"("tessera": {"mesh": {"tp": 2}}, "zero_optimization": {"stage": 3})"),
            std::make_tuple(Names({"shard", "tp"}), Shape({2}), 2));
  EXPECT_EQ(dims(R"("tessera": {"mesh": {"replicate": 2}}, "zero_optimization": {"stage": 3})"),
            std::make_tuple(Names({"replicate", "shard"}), Shape({2, 2}), 4));
  EXPECT_EQ(dims(R"("tessera": {"mesh": {"replicate": 2, "cp": 2, "shard": 1}}, "zero_optimization": {"stage": 3})"),
            std::make_tuple(Names({"replicate", "cp"}), Shape({2, 2}), 2));
  EXPECT_EQ(dims(R"("tessera": {"mesh": {"tp": 4}}, "zero_optimization": {"stage": 3})"),
            std::make_tuple(Names({"shard", "tp"}), Shape({1}), 1));
  const auto config = TrainConfig::parse(R"({"train_batch_size": 8})", {.ranks = 8});
  EXPECT_THROWS_WITH(config.make_mesh(test_device_type()), "8");
}

TEST(AppliedConfig, ThePlanIsTheFilesOrAGuess) {
  auto net = make_net();
  const auto own = parse(R"("tessera": {"plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}})");
  EXPECT_EQ(own.parallel_plan(*net).size(), 2);
  EXPECT_EQ(to_string(parse(R"("steps_per_print": 1)").parallel_plan(*net)), to_string(plan_for(*net, {.ranks = 1})));
}

struct StreamImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 512;
  StreamImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, kWidth));
    down = register_module("down", torch::nn::Linear(kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};

/// The sum over the ranks of a rank's results is cut in chunks where a layer overlaps.
TEST(AppliedConfig, LayersOverlapAsTheKeySays) {
  constexpr int64_t kChunks = 4;
  const auto x = [] { // of which a rank's product is worth measuring
    torch::manual_seed(6);
    return torch::randn({2, 128, StreamImpl::kWidth});
  }();
  for (const std::string when : {"never", "always", "measured"}) {
    SCOPED_TRACE(when);
    const auto config = parse(c10::str(R"("zero_optimization": {"stage": 3}, "tessera": {"mesh": {"tp": )", world_size(),
                                       R"(}, "sequence_parallel": true, "overlap": ")", when, "\"}"));
    EXPECT_EQ(config.sharding.overlap, overlap_of(when));
    torch::manual_seed(5);
    StreamImpl twin;
    torch::manual_seed(5);
    StreamImpl model;
    const TrainSetup setup(config, test_device_type(), {});
    setup.shard(model, {});
    const auto decided = overlap_decisions().size();
    for (const bool is_first : {true, false}) { // a layer is measured in its first call
      const CountCollectives counter;
      const auto y = model.forward(x);
      const auto scattered = counter.count(CollectiveKind::kReduceScatter).calls;
      EXPECT_TENSORS_CLOSE((is_dtensor(y) ? DTensor(y).full_tensor() : y).detach(), twin.forward(x).detach(), 1e-4, 1e-5);
      if (world_size() == 1 || (is_first && when == "measured")) continue;
      const bool overlaps = when == "measured" ? overlap_decisions().back().overlaps : when == "always";
      EXPECT_EQ(scattered, overlaps ? kChunks : 1) << counter.to_string();
    }
    const size_t layers = when == "measured" && world_size() > 1 ? 2 : 0;
    EXPECT_EQ(overlap_decisions().size() - decided, layers) << "gathered before one, scattered behind the other";
  }
}

} // namespace
} // namespace tessera::testing::applied_test
