// Sharded models whose gathers and reductions are in fewer bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/communication/all_strategies.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::communication_test {
namespace {

using torch::Tensor;

constexpr int64_t kSmallest = 200; // of the numbers of a parameter that are coded: none is of one dim

Communication quantized_gather(const BlockCodec& codec = {Wire::kInt8, 64}) {
  return {.gather = QuantizedGather{.codec = codec, .smallest = kSmallest}};
}

bool is_quantized(const Tensor& parameter) { return parameter.dim() > 1 && parameter.numel() >= kSmallest; }

std::vector<Strategy> gathering_strategies() {
  auto all = all_strategies();
  std::erase_if(all, [](const auto& each) { return each.replicates; });
  all.push_back({"in files", world_mesh, {.offload = offload_to_files(std::filesystem::temp_directory_path())}});
  return all;
}

/// The values with which a forward computes.
std::vector<Tensor> values_in_forward(Net& net) {
  std::vector<Tensor> values;
  for (const auto& parameter : net->parameters()) values.push_back(unsharded(parameter).detach().clone().cpu());
  return values;
}

void expect_equal_on_all_ranks(const std::vector<Tensor>& values) {
  const auto ranks = init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto& value : values) {
    auto least = value.reshape({-1}).to(torch::kDouble).clone();
    ranks->all_reduce(least, ReduceOp::kMin, "equal").wait();
    EXPECT_TENSORS_EQUAL(least, value.reshape({-1}).to(torch::kDouble));
  }
}

bool gathers(const Strategy& strategy) { return strategy.mesh().size(strategy.mesh().ndim() - 1) > 1; }

TEST(QuantizedGather, AForwardComputesWithWhatTheCodesSay) {
  for (const auto& strategy : sweep(gathering_strategies(), 5, is_default)) {
    SCOPED_TRACE(strategy.name);
    auto quantized = strategy;
    quantized.options.communication = quantized_gather();
    Net net = make_net(), plain = make_net();
    shard_model(net, quantized);
    const auto values = values_in_forward(net);
    expect_equal_on_all_ranks(values);
    const auto names = plain->named_parameters();
    bool any_differs = false;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto expected = names[i].value().detach();
      const auto most = expected.abs().max().item<double>();
      const double bound = is_quantized(expected) ? 2 * most / 254 * 1.001 : 0; // twice in a hierarchical strategy
      EXPECT_LE((values[i] - expected).abs().max().item<double>(), bound) << names[i].key();
      any_differs = any_differs || !torch::equal(values[i], expected);
      EXPECT_TENSORS_EQUAL(full(net->parameters()[i]), expected) << "the shards are not rounded";
    }
    EXPECT_EQ(any_differs, world_size() > 1 && (gathers(strategy) || strategy.name.starts_with("hierarchical")));
  }
}

/// A step of SGD on the weights, with the gradients of what a forward computes with.
TEST(QuantizedGather, TrainsAsTheModelWithRoundedWeights) {
  for (const auto& strategy : sweep(gathering_strategies(), 5, is_default)) {
    for (const bool in_halves : {false, true}) {
      SCOPED_TRACE(strategy.name + (in_halves ? ", bf16" : ""));
      auto quantized = strategy;
      quantized.options.communication = quantized_gather();
      if (in_halves) quantized.options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      Net net = make_net();
      shard_model(net, quantized);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int64_t step = 0; step < 3; ++step) {
        Net rounded = make_net();
        const auto values = values_in_forward(net);
        {
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < values.size(); ++i) rounded->parameters()[i].copy_(values[i]);
        }
        const auto loss = loss_of(net, own_batch(step));
        const auto expected = loss_of(rounded, global_batch(step));
        EXPECT_NEAR(mean_over_ranks(loss).item<double>(), expected.item<double>(),
                    in_halves ? 0.01 * expected.item<double>() : 1e-5);
        {
          const torch::NoGradGuard no_grad;
          const auto evaluated = loss_of(net, own_batch(step));
          if (!in_halves) EXPECT_NEAR(evaluated.item<double>(), loss.item<double>(), 1e-6);
        }
        loss.backward();
        expected.backward();
        for (size_t i = 0; i < values.size(); ++i) {
          const double tolerance = in_halves ? 2e-2 : 1e-5;
          EXPECT_TENSORS_CLOSE(full(net->parameters()[i].grad()).to(torch::kFloat), rounded->parameters()[i].grad(), tolerance,
                               tolerance);
        }
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
}

TEST(QuantizedGather, SendsCodesAndScales) {
  if (world_size() == 1) return;
  for (const auto layout : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      torch::manual_seed(0);
      torch::nn::Linear linear(torch::nn::LinearOptions(512, 64 * world_size()).bias(false));
      FullyShardOptions options{.layout = layout, .communication = {.gather = QuantizedGather{}}};
      options.mixed_precision.param_dtype = dtype;
      fully_shard(linear, world_mesh(), options);
      const int64_t numel = 512 * 64 * world_size();
      const auto summary = explain(*linear).groups[0];
      auto handle = fsdp(*linear);
      process_context().reset_counters();
      handle.unshard();
      const auto sent = process_context().count(CollectiveKind::kAllGather);
      EXPECT_EQ(sent.bytes, numel + numel / 256 * 4); // 0.508 of bf16, 0.254 of fp32
      EXPECT_EQ(sent.calls, 1);
      EXPECT_EQ(summary.gather_bytes, sent.bytes);
    }
  }
}

TEST(QuantizedGather, KeepsStridesAndNewParameters) {
  torch::manual_seed(0);
  torch::nn::Linear linear(50, 70);
  linear->weight.set_data(linear->weight.t().contiguous().t());
  const auto before = linear->weight.detach().clone();
  fully_shard(linear, world_mesh(), {.communication = quantized_gather()});
  const double bound = world_size() > 1 ? before.abs().max().item<double>() / 254 * 1.001 : 0;
  const auto error = [&] { return (unsharded(linear->weight).detach().cpu() - before).abs().max().item<double>(); };
  EXPECT_LE(error(), bound);
  EXPECT_EQ(unsharded(linear->weight).strides(), (std::vector<int64_t>{1, 70}));
  linear->register_parameter("added", torch::ones({2, 2}));
  reshard_parameters(linear);
  EXPECT_LE(error(), bound);
  EXPECT_EQ(error() > 0, world_size() > 1) << "is quantized still";
}

TEST(QuantizedGather, RefusesWhatItCannotDo) {
  const auto shard = [](torch::nn::Module& module, FullyShardOptions options, const Communication& communication) {
    options.communication = communication;
    fully_shard(module, world_mesh(), options);
  };
  torch::manual_seed(0);
  torch::nn::Linear linear(40, 40);
  EXPECT_THROWS_WITH(shard(*linear, {.strategy = tessera::Strategy::kNoShard}, quantized_gather()),
                     "a quantized gather, but the strategy no-shard gathers no parameter");
  EXPECT_THROWS_WITH(shard(*linear, {}, quantized_gather({Wire::kInt8, 100})), "blocks of 100 numbers, but a block has");
  EXPECT_THROWS_WITH(shard(*linear, {}, {.gather = QuantizedGather{.smallest = -5}}), "smallest of the quantized gather is -5");
  torch::nn::Module integers;
  integers.register_parameter("table", torch::ones({40, 40}, torch::kLong), /*requires_grad=*/false);
  EXPECT_THROWS_WITH(shard(integers, {}, quantized_gather()),
                     "no parameter of the call (table, of Long, ...) has floating-point numbers");
  EXPECT_THROWS_WITH(shard(integers, {}, {.reduction = quantized_reduction()}), "has floating-point numbers");
  shard(*linear, {}, quantized_gather());
  if (world_size() == 1) return;
  const torch::NoGradGuard no_grad;
  EXPECT_THROWS_WITH(unsharded(linear->weight)[0].fill_(1),
                     "the unsharded parameter weight was written, and it is gathered in fewer bits");
  unsharded(linear->bias)[0].fill_(1); // of one dim
  EXPECT_EQ(full(linear->bias)[0].item<double>(), 1);
  linear->weight[0].fill_(2);
  EXPECT_TENSORS_CLOSE(unsharded(linear->weight)[0].detach().cpu(), torch::full({40}, 2.F), 1e-5, 1e-5);
}

TEST(Communication, SaysWhatDiffersBetweenRanks) {
  if (world_size() == 1) return;
  const auto shard = [](const Communication& communication) {
    torch::nn::Linear linear(40, 40);
    fully_shard(linear, world_mesh(), {.initial_weights = InitialWeights::kUnchecked, .communication = communication});
  };
  EXPECT_THROWS_WITH(shard(world_rank() == 0 ? quantized_gather() : Communication{}), "the ranks' models or options differ");
  const auto wire = world_rank() == 0 ? Wire::kInt8 : Wire::kInt4;
  EXPECT_THROWS_WITH(shard({.reduction = quantized_reduction({.codec = {wire, 64}})}), "the ranks' models or options differ");
}

struct Reduction {
  std::string name;
  Communication communication;
  double error; ///< of one coding, in parts of the largest gradient
};

std::vector<Reduction> reductions() {
  const auto make = [](const std::string& name, const BlockCodec& codec, bool feeds, std::optional<BlockCodec> inner = {}) {
    return Reduction{
        name,
        {.reduction = quantized_reduction({.codec = codec, .inner = inner, .smallest = kSmallest, .error_feedback = feeds})},
        inner ? std::max(codec.largest_error(), inner->largest_error()) : codec.largest_error()};
  };
  return {make("int8", {Wire::kInt8, 64}, false), make("int4", {Wire::kInt4, 64}, false), make("fp8", {Wire::kFloat8, 64}, true),
          make("int8 inside, int4 between", {Wire::kInt4, 64}, true, BlockCodec{Wire::kInt8, 64})};
}

std::vector<Tensor> gradients_of(torch::nn::Module& net) {
  std::vector<Tensor> gradients;
  for (const auto& parameter : net.parameters()) gradients.push_back(full(parameter.grad()).to(torch::kDouble));
  return gradients;
}

/// The gradients are those of the whole batch, whatever divides the ranks. A rank's own gradients bound the error.
void expect_the_plain_mean(const Strategy& strategy, const Reduction& kind, Net plain, Net net) {
  auto quantized = strategy;
  quantized.options.communication = kind.communication;
  shard_model(net, quantized);
  loss_of(plain, own_batch(0)).backward();
  const auto own = gradients_of(*plain);
  loss_of(net, own_batch(0)).backward();
  const auto got = gradients_of(*net);
  const auto ranks = init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (size_t i = 0; i < own.size(); ++i) {
    auto mean = own[i].reshape({-1}).clone(), most = own[i].abs().max().view({1});
    ranks->all_reduce(mean, ReduceOp::kAvg, "mean").wait();
    ranks->all_reduce(most, ReduceOp::kMax, "largest").wait();
    const bool is_coded = is_quantized(own[i]) || kind.name == "bf16";
    const double bound = is_coded ? 3 * kind.error : 0; // the codings of a reduction
    EXPECT_LE((got[i].reshape({-1}) - mean).abs().max().item<double>(), (bound + 1e-6) * most.item<double>())
        << kind.name << ", parameter " << i;
  }
  expect_equal_on_all_ranks(got);
}

TEST(QuantizedReduction, IsThePlainMeanInEveryStrategy) {
  for (const auto& strategy : sweep(all_strategies(), 6, is_default)) {
    for (const auto& kind : reductions()) {
      SCOPED_TRACE(strategy.name + ", " + kind.name);
      expect_the_plain_mean(strategy, kind, make_net(), make_net());
    }
  }
}

TEST(QuantizedReduction, IsThePlainMeanOnEightAndSixteenRanks) {
  if (world_size() > 1) GTEST_SKIP() << "has its own ranks";
  for (const int64_t count : {8, 16}) {
    for (const int64_t outer : {int64_t{1}, int64_t{2}, int64_t{4}, count}) {
      for (const auto form : {tessera::Strategy::kHybridShard, tessera::Strategy::kHierarchical}) {
        const auto kinds = reductions();
        std::vector<std::pair<Net, Net>> of_ranks;
        for (int64_t rank = 0; rank < count; ++rank) of_ranks.emplace_back(make_net(), make_net());
        run_ranks_as_threads(static_cast<int>(count), [&] {
          SCOPED_TRACE(c10::str(outer, " x ", count / outer));
          const auto mesh = [&] { return init_device_mesh(torch::kCPU, {outer, count / outer}, {"replicate", "shard"}); };
          auto& [plain, net] = of_ranks[static_cast<size_t>(world_rank())];
          const Strategy strategy{"", mesh, {.strategy = form}};
          auto quantized = strategy;
          const auto& kind = kinds[static_cast<size_t>(outer) % kinds.size()];
          quantized.options.communication = kind.communication;
          shard_model(net, quantized);
          auto batch = torch::cat({global_batch(0), global_batch(1)}).narrow(0, world_rank(), 1);
          loss_of(plain, batch).backward();
          loss_of(net, batch).backward();
          const auto own = gradients_of(*plain), got = gradients_of(*net);
          const auto ranks = init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
          for (size_t i = 0; i < own.size(); ++i) {
            auto mean = own[i].reshape({-1}).clone(), most = own[i].abs().max().view({1});
            ranks->all_reduce(mean, ReduceOp::kAvg, "mean").wait();
            ranks->all_reduce(most, ReduceOp::kMax, "largest").wait();
            EXPECT_LE((got[i].reshape({-1}) - mean).abs().max().item<double>(), (3 * kind.error + 1e-6) * most.item<double>());
          }
        });
      }
    }
  }
}

TEST(QuantizedReduction, SendsWhatExplainSays) {
  if (world_size() == 1) return;
  for (const auto& strategy : all_strategies()) {
    for (const auto& kind : reductions()) {
      SCOPED_TRACE(strategy.name + ", " + kind.name);
      auto quantized = strategy;
      quantized.options.communication = kind.communication;
      Net net = make_net();
      shard_model(net, quantized);
      auto handle = fsdp(*net);
      int64_t predicted = 0;
      for (const auto& group : explain(*net).groups) predicted += group.reduce_payload_bytes;
      const auto loss = loss_of(net, own_batch(0));
      handle.set_reporting(true);
      process_context().reset_counters();
      loss.backward();
      const auto sent = process_context().count(CollectiveKind::kAllToAll).bytes;
      const auto report = handle.report();
      EXPECT_EQ(report.reduce_scatters().bytes + report.all_reduces().bytes, predicted);
      const auto gathered = process_context().count(CollectiveKind::kAllGather).bytes - report.all_gathers().bytes;
      EXPECT_EQ(sent + gathered, predicted);
    }
  }
}

TEST(QuantizedReduction, IsExplainedWithWhatItKeeps) {
  if (world_size() == 1) return;
  const auto parameters_of = [](bool feeds_back) {
    torch::manual_seed(0);
    torch::nn::Linear linear(64, 64);
    const auto policy = quantized_reduction({.codec = {Wire::kInt8, 64}, .smallest = 0, .error_feedback = feeds_back});
    fully_shard(linear, world_mesh(), {.communication = {.reduction = policy}});
    return explain(*linear).memory.parameters;
  };
  const auto kept = parameters_of(true) - parameters_of(false);
  EXPECT_GE(kept, 4 * (64 * 64 + 64));
  EXPECT_LE(kept, 4 * (64 * 64 + 64) + 1000 * world_size()); // and flags, and gaps
}

TEST(QuantizedReduction, SendsHalfAndAQuarterOfHalves) {
  if (world_size() == 1) return;
  for (const auto& [wire, part] : std::vector<std::pair<Wire, double>>{{Wire::kInt8, 0.5}, {Wire::kInt4, 0.25}}) {
    torch::manual_seed(0);
    torch::nn::Linear linear(torch::nn::LinearOptions(512, 64 * world_size()).bias(false));
    FullyShardOptions options{.communication = {.reduction = quantized_reduction({.codec = {wire, 256}})}};
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16};
    fully_shard(linear, world_mesh(), options);
    const auto loss = linear(torch::ones({2, 512}).to(test_device())).sum();
    process_context().reset_counters();
    loss.backward();
    const double halves = 2. * 512 * 64 * world_size(), scales = halves / 2 / 256 * 4;
    const auto sent = static_cast<double>(process_context().count(CollectiveKind::kAllToAll).bytes);
    EXPECT_NEAR(sent, part * halves + scales, 16. * world_size()) << to_string(wire); // and a flag
    EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, 0);
  }
}

TEST(QuantizedReduction, GoesOnThroughAccumulationAndFrozenParameters) {
  for (const auto& strategy : sweep(all_strategies(), 4, is_default)) {
    SCOPED_TRACE(strategy.name);
    auto quantized = strategy;
    quantized.options.communication = {
        .gather = strategy.replicates ? std::nullopt : quantized_gather().gather,
        .reduction = quantized_reduction({.codec = {Wire::kInt8, 64}, .smallest = kSmallest, .error_feedback = true})};
    Net net = make_net();
    shard_model(net, quantized);
    auto handle = fsdp(*net);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    double first = 0, last = 0;
    for (int64_t step = 0; step < 8; ++step) {
      net->blocks->at<BlockImpl>(0).up->weight.requires_grad_(step != 4);
      handle.set_requires_all_reduce(step % 2 == 0);
      {
        const auto scope = no_sync(*net);
        loss_of(net, own_batch(0)).backward();
      }
      handle.set_requires_all_reduce(false);
      loss_of(net, own_batch(0)).backward();
      handle.set_requires_all_reduce(true);
      const auto loss = loss_of(net, own_batch(0));
      loss.backward();
      clip_grad_norm_(*net, 1.0);
      optimizer.step();
      optimizer.zero_grad();
      (step == 0 ? first : last) = mean_over_ranks(loss).item<double>();
    }
    EXPECT_LT(last, first - 0.02);
    std::vector<Tensor> weights;
    for (const auto& parameter : net->parameters()) weights.push_back(full(parameter));
    expect_equal_on_all_ranks(weights);
  }
}

TEST(QuantizedReduction, ANaNReachesAllRanks) {
  for (const auto& strategy : sweep(all_strategies(), 4, is_default)) {
    for (const auto& kind : reductions()) {
      SCOPED_TRACE(strategy.name + ", " + kind.name);
      auto quantized = strategy;
      quantized.options.communication = kind.communication;
      Net net = make_net();
      shard_model(net, quantized);
      auto loss = loss_of(net, own_batch(0));
      if (world_rank() == world_size() - 1) loss = loss * NAN;
      loss.backward();
      EXPECT_FALSE(std::isfinite(clip_grad_norm_(*net, 1.0).item<double>()));
    }
  }
}

/// A reduction of a program's own: the gradients in bf16, over the plain collectives.
class InHalves final : public ReductionExtension {
 public:
  Work reduce(const tessera::Reduction& reduction) override {
    const auto input = reduction.input.to(torch::kBFloat16);
    auto& ranks = *reduction.stage.communicator;
    if (reduction.stage.kind == ReductionStage::Kind::kAllReduce)
      return then(ranks.all_reduce(input, reduction.op, reduction.label), [=] { reduction.output.copy_(input); });
    const auto output = torch::empty(reduction.output.sizes(), input.options());
    return then(ranks.reduce_scatter(output, input, reduction.op, reduction.label), [=] { reduction.output.copy_(output); });
  }
  int64_t payload(const ReductionStage& stage) const override { return stage.chunks * 2; }
};

struct InHalvesPolicy final : ReductionPolicy {
  std::string description() const override { return "bf16"; }
  std::shared_ptr<ReductionExtension> make(const std::shared_ptr<const GradientLayout>&,
                                           const std::vector<ReductionStage>&) const override {
    return std::make_shared<InHalves>();
  }
};

TEST(ReductionExtension, MayBeTheProgramsOwn) {
  for (const auto& strategy : all_strategies()) {
    SCOPED_TRACE(strategy.name);
    expect_the_plain_mean(strategy, {"bf16", {.reduction = std::make_shared<InHalvesPolicy>()}, 0.01}, make_net(), make_net());
  }
}

TEST(PowerSGD, TrainsReplicas) {
  auto replicas = all_strategies();
  std::erase_if(replicas, [](const auto& each) { return !each.replicates && !each.name.starts_with("hybrid of"); });
  for (const auto& strategy : replicas) {
    SCOPED_TRACE(strategy.name);
    const auto mesh = strategy.mesh();
    if (mesh.size(0) == 1) continue;
    auto low_rank = strategy;
    low_rank.options.communication = {.reduction = power_sgd({.rank = 4, .start_after = 2})};
    Net net = make_net(), plain = make_net();
    shard_model(net, low_rank);
    torch::optim::SGD optimizer(net->parameters(), 0.3), plain_optimizer(plain->parameters(), 0.3);
    double loss_here = 0, loss_there = 0;
    for (int64_t step = 0; step < 30; ++step) {
      const auto loss = loss_of(net, own_batch(0));
      const auto expected = loss_of(plain, global_batch(0));
      loss.backward();
      expected.backward();
      if (step < 2) {
        for (size_t i = 0; i < plain->parameters().size(); ++i)
          EXPECT_TENSORS_CLOSE(full(net->parameters()[i].grad()), plain->parameters()[i].grad(), 1e-4, 1e-5);
      }
      optimizer.step();
      plain_optimizer.step();
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
      loss_here = mean_over_ranks(loss).item<double>();
      loss_there = expected.item<double>();
    }
    EXPECT_NEAR(loss_here, loss_there, 0.1 * loss_there);
    std::vector<Tensor> weights;
    for (const auto& parameter : net->parameters()) weights.push_back(full(parameter));
    expect_equal_on_all_ranks(weights);
  }
}

TEST(PowerSGD, RefusesStrategiesWithoutAnAllReduce) {
  if (world_size() == 1) return;
  torch::manual_seed(0);
  torch::nn::Linear linear(40, 40);
  EXPECT_THROWS_WITH(fully_shard(linear, world_mesh(), {.communication = {.reduction = power_sgd()}}),
                     "PowerSGD is for all-reduces, and the strategy has none");
}

} // namespace
} // namespace tessera::testing::communication_test
