// Parameters that are gathered as something else than their shards: fp8 with a scale of all ranks, and int8 in blocks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <any>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/model/sharded_module.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/offload_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

namespace tessera::testing::gather_extension_test {
namespace {

using torch::Tensor;
using Gathered = std::vector<std::vector<Tensor>>;

/// The tensor `i` that each rank sent, one after another.
Tensor rows_of(const Gathered& gathered, size_t i) {
  std::vector<Tensor> parts;
  for (const auto& rank : gathered) parts.push_back(rank[i]);
  return torch::cat(parts);
}

Tensor to_fp8(const Tensor& values, const Tensor& scale) { return (values / scale).to(torch::kFloat8_e4m3fn); }

/// The weight in float8_e4m3fn, scaled by its largest element, on whichever rank that is.
struct Fp8 final : GatherExtension {
  Sent before(const Tensor& shard, const DeviceMesh& mesh) override {
    const auto largest = shard.numel() > 0 ? shard.abs().max() : shard.new_zeros({});
    auto scale = (largest.view({1}) / 448).clamp_min(1e-12); // not 0 if the whole weight is 0
    const int64_t dim = mesh.ndim() - 1;                     // replicas have the same
    mesh.communicator(dim, "fp8 scales")->all_reduce(scale, ReduceOp::kMax, "fp8 scale").wait();
    return {{to_fp8(shard, scale)}, scale};
  }
  Tensor after(const Gathered& gathered, const std::any& metadata, const Tensor& out) override {
    return out.copy_(rows_of(gathered, 0).to(torch::kFloat) * std::any_cast<Tensor>(metadata));
  }
};

std::pair<Tensor, Tensor> to_int8(const Tensor& rows) {
  const auto scale = rows.abs().amax(std::vector<int64_t>(1, 1), true) / 127 + 1e-12;
  return {(rows / scale).round().to(torch::kInt8), scale};
}

/// Int8 and a scale a row, whose shapes are of each rank's rows. Returns a tensor of its own.
struct RowsInInt8 final : GatherExtension {
  Sent before(const Tensor& shard, const DeviceMesh&) override {
    auto [rows, scale] = to_int8(shard);
    return {{rows, scale}};
  }
  Tensor after(const Gathered& gathered, const std::any&, const Tensor&) override {
    return rows_of(gathered, 0) * rows_of(gathered, 1);
  }
};

struct Kind {
  std::string name;
  std::shared_ptr<GatherExtension> extension;
  std::function<Tensor(const Tensor&)> rounded; ///< what a whole weight becomes
  int64_t bytes_of_row;                         ///< sent, of `n` elements: n + this
};

std::vector<Kind> kinds() {
  return {{"fp8", std::make_shared<Fp8>(),
           [](const Tensor& weight) {
             const auto scale = weight.abs().max() / 448;
             return to_fp8(weight, scale).to(torch::kFloat) * scale;
           },
           0},
          {"int8", std::make_shared<RowsInInt8>(),
           [](const Tensor& weight) {
             const auto [rows, scale] = to_int8(weight);
             return rows * scale;
           },
           4}};
}

bool is_extended(const Tensor& parameter) { return parameter.dim() == 2; }

GatherExtensionFn for_matrices(const std::shared_ptr<GatherExtension>& extension) {
  return [extension](const std::string&, const Tensor& parameter) { return is_extended(parameter) ? extension : nullptr; };
}

std::vector<Strategy> gathering_strategies() {
  auto all = strategies();
  std::erase_if(all, [](const auto& each) {
    const auto& option = each.options.reshard_after_forward;
    return each.replicates || (option && option->ranks()) || each.name.ends_with("per-parameter");
  });
  all.push_back({"in files", world_mesh, {.offload = offload_to_files(std::filesystem::temp_directory_path())}});
  return all;
}

void shard_net(Net& net, const Strategy& strategy, const Kind& kind) {
  auto extended = strategy;
  extended.options.gather_extension_fn = for_matrices(kind.extension);
  shard_model(net, extended);
}

/// What is gathered ahead in a function's first run is another group than in the second.
TEST(GatherExtension, ItsOperatorsAreNoneOfARecomputedFunction) {
  RecomputeOptions options;
  options.keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    const auto& name = op.operator_name().name;
    return name == "aten::max" || name == "aten::div" || name == "aten::mm";
  };
  const auto gradients = [](const std::function<Tensor(torch::nn::Linear&, const Tensor&)>& run) {
    torch::manual_seed(0);
    std::vector<torch::nn::Linear> layers;
    for (const double scale : {1., 1e3, 1e-3, 30.}) {
      layers.emplace_back(torch::nn::LinearOptions(8, 8).bias(false));
      const torch::NoGradGuard no_grad;
      layers.back()->weight.mul_(scale);
    }
    torch::nn::ModuleList model;
    for (auto& layer : layers) {
      model->push_back(layer);
      fully_shard(layer, world_mesh(), {.gather_extension_fn = for_matrices(std::make_shared<Fp8>())});
    }
    fully_shard(*model, world_mesh());
    std::vector<Tensor> all;
    for (int step = 0; step < 2; ++step) { // the second has an order to gather ahead in
      Tensor x = torch::ones({2, 8}).to(test_device());
      for (auto& layer : layers) x = run(layer, x).tanh();
      model->zero_grad();
      x.sum().backward();
    }
    for (const auto& layer : layers) all.push_back(full(layer->weight.grad()));
    return all;
  };
  const auto expected = gradients([](torch::nn::Linear& layer, const Tensor& x) { return layer(x); });
  const auto actual = gradients([&](torch::nn::Linear& layer, const Tensor& x) { return recompute(options, layer, x); });
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TENSORS_EQUAL(actual[i], expected[i]);
}

/// A step of SGD on the weights, with the gradients of the rounded ones.
void step_on_rounded(Net& plain, const Kind& kind, const std::function<void()>& backward) {
  std::vector<Tensor> values;
  const auto parameters = plain->parameters();
  {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : parameters) {
      values.push_back(parameter.clone());
      if (is_extended(parameter)) parameter.copy_(kind.rounded(parameter.to(twin_device())));
    }
  }
  backward();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) parameters[i].copy_(values[i] - 0.1 * parameters[i].grad());
  plain->zero_grad();
}

TEST(GatherExtension, TrainsAsTheModelWithRoundedWeights) {
  for (const auto& kind : kinds()) {
    for (const auto& strategy : sweep(gathering_strategies(), 3, is_default)) {
      SCOPED_TRACE(kind.name + ", " + strategy.name);
      Net net = make_net(), plain = make_net();
      shard_net(net, strategy, kind);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int64_t step = 0; step < 3; ++step) {
        const auto loss = loss_on_device(net, own_batch(step).to(test_device()));
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        step_on_rounded(plain, kind, [&] {
          const auto expected = loss_of(plain, global_batch(step));
          EXPECT_NEAR(mean_over_ranks(loss).item<double>(), expected.item<double>(), 1e-5);
          expected.backward();
        });
      }
      EXPECT_LE(parameter_difference(*net, *plain), 2e-3); // a value between two of fp8 may go either way
      const auto weight = net->blocks->at<BlockImpl>(0).up->weight;
      EXPECT_TENSORS_CLOSE(unsharded(weight).detach().clone(), kind.rounded(full(weight).to(twin_device())), 1e-5, 1e-6);
      EXPECT_FALSE(torch::equal(unsharded(weight).detach().cpu(), full(weight))) << "the shards are not rounded";
    }
  }
}

TEST(GatherExtension, SendsItsOwnBytes) {
  if (world_size() == 1) return;
  for (const auto& kind : kinds()) {
    torch::manual_seed(0);
    torch::nn::Linear linear(torch::nn::LinearOptions(16, 16 * world_size()).bias(false));
    fully_shard(linear, world_mesh(), {.gather_extension_fn = for_matrices(kind.extension)});
    const auto handle = fsdp(*linear);
    auto each = handle;
    each.unshard(); // the first one tells the shapes
    each.reshard();
    process_context().reset_counters();
    each.unshard();
    const auto rows = 16 * world_size();
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).bytes, rows * (16 + kind.bytes_of_row)) << kind.name;
    EXPECT_EQ(process_context().count(CollectiveKind::kAllGather).calls, 1);
  }
}

TEST(GatherExtension, ReadsInTheDtypeOfThePolicyAndKeepsStrides) {
  for (const auto& kind : kinds()) {
    torch::manual_seed(0);
    torch::nn::Linear linear(5, 7);
    linear->weight.set_data(linear->weight.t().contiguous().t());
    const auto expected = kind.rounded(linear->weight.detach().clone().to(twin_device())).to(torch::kBFloat16);
    FullyShardOptions options{.gather_extension_fn = for_matrices(kind.extension)};
    options.mixed_precision.param_dtype = torch::kBFloat16;
    fully_shard(linear, world_mesh(), options);
    EXPECT_TENSORS_EQUAL(unsharded(linear->weight).detach(), expected);
    EXPECT_EQ(unsharded(linear->weight).strides(), (std::vector<int64_t>{1, 7}));
    const auto added = linear->register_parameter("added", torch::ones({2, 2}));
    reshard_parameters(linear);
    EXPECT_TENSORS_EQUAL(unsharded(linear->weight).detach(), expected);
    EXPECT_TENSORS_EQUAL(unsharded(added).detach(), torch::ones({2, 2}, torch::kBFloat16));
  }
}

TEST(GatherExtension, AWeightOfZerosIsGatheredAsZeros) {
  for (const auto& kind : kinds()) {
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 6).bias(false));
    torch::nn::init::zeros_(linear->weight);
    fully_shard(linear, world_mesh(), {.gather_extension_fn = for_matrices(kind.extension)});
    EXPECT_TENSORS_EQUAL(unsharded(linear->weight).detach(), torch::zeros({6, 4})) << kind.name;
  }
}

/// Does as it is told.
struct Told final : GatherExtension {
  Sent before(const Tensor& shard, const DeviceMesh&) override { return send(shard); }
  Tensor after(const Gathered& gathered, const std::any&, const Tensor& out) override { return make(gathered, out); }
  std::function<Sent(const Tensor&)> send = [](const Tensor& shard) { return Sent{{shard}}; };
  std::function<Tensor(const Gathered&, const Tensor&)> make = [](const Gathered& gathered, const Tensor&) {
    return rows_of(gathered, 0);
  };
};

/// A linear layer whose weight, [8, 3], is gathered as `told` says.
torch::nn::Linear sharded_linear(const std::shared_ptr<Told>& told, FullyShardOptions options = {}) {
  torch::manual_seed(0);
  torch::nn::Linear linear(3, 8);
  options.gather_extension_fn = for_matrices(told);
  fully_shard(linear, world_mesh(), options);
  return linear;
}

TEST(GatherExtension, SaysWhatIsWrong) {
  const auto told = std::make_shared<Told>();
  const auto x = torch::ones({1, 3}).to(test_device());
  const Told plain;
  told->send = [](const Tensor&) { return GatherExtension::Sent{{Tensor()}}; };
  EXPECT_THROWS_WITH(sharded_linear(told)(x), "the gather extension of weight sends tensor 0 on rank");
  told->send = plain.send;
  auto linear = sharded_linear(told);
  told->make = [](const Gathered& gathered, const Tensor&) { return rows_of(gathered, 0).t(); };
  EXPECT_THROWS_WITH(linear(x), "the gather extension of weight made a tensor of shape [3, 8], but the parameter has [8, 3]");
  told->make = [](const Gathered&, const Tensor&) { return Tensor(); };
  EXPECT_THROWS_WITH(linear(x), "the gather extension of weight returned an undefined tensor from `after`");
  told->make = plain.make;
  const auto expected = linear(x).detach(); // after an error it goes on
  EXPECT_TENSORS_CLOSE(expected, torch::linear(x.cpu(), full(linear->weight), full(linear->bias)));
  fsdp(*linear).reshard();
  told->send = [](const Tensor& shard) { return GatherExtension::Sent{{shard.to(torch::kDouble)}}; };
  EXPECT_THROWS_WITH(linear(x), "sends tensors of other shapes or dtypes than in the first gather");
  const auto group = fsdp(*linear).state()->group();
  EXPECT_EQ(group->parameters()[0].leaf.storage().nbytes(), 0) << "memory of a gather that did not begin";
  told->send = plain.send;
  {
    const torch::NoGradGuard no_grad;
    EXPECT_THROWS_WITH(unsharded(linear->weight)[0].fill_(1),
                       "the unsharded parameter weight was written, and it has a gather extension");
    EXPECT_TENSORS_EQUAL(unsharded(linear->weight).clone(), full(linear->weight)); // what was written is not kept
    linear->weight.copy_(torch::ones({8, 3}));
    linear->weight[0].fill_(2);
    linear->weight.t()[1].copy_(torch::full({8}, 3).to(x.device()));
  }
  auto written = torch::ones({8, 3});
  written[0].fill_(2);
  written.t()[1].fill_(3);
  EXPECT_TENSORS_EQUAL(full(linear->weight), written);
}

TEST(GatherExtension, MustNotReadWhatItGathers) {
  const auto told = std::make_shared<Told>();
  const auto x = torch::ones({1, 3}).to(test_device());
  const Told plain;
  auto linear = sharded_linear(told);
  auto handle = fsdp(*linear);
  constexpr const char* kError = "reads or frees the parameters of this group while it is gathered";
  told->send = [&](const Tensor& shard) {
    handle.unshard();
    return GatherExtension::Sent{{shard}};
  };
  EXPECT_THROWS_WITH(linear(x), kError);
  told->send = plain.send;
  for (const bool reads : {true, false}) {
    told->make = [&](const Gathered& gathered, const Tensor&) {
      reads ? handle.unshard() : handle.reshard();
      return rows_of(gathered, 0);
    };
    EXPECT_THROWS_WITH(linear(x), kError);
  }
  told->make = plain.make;
  EXPECT_TENSORS_CLOSE(linear(x).detach(), torch::linear(x.cpu(), full(linear->weight), full(linear->bias)));
}

TEST(GatherExtension, SaysWhichOptionsDoNotGoWithIt) {
  const auto told = std::make_shared<Told>();
  EXPECT_THROWS_WITH(sharded_linear(told, {.strategy = tessera::Strategy::kNoShard}),
                     "the strategy no-shard gathers no parameter");
  if (world_size() == 4) {
    EXPECT_THROWS_WITH(sharded_linear(told, {.reshard_after_forward = 2}), "reshard_after_forward is a number of ranks");
  }
}

TEST(GatherExtension, SaysWhatDiffersBetweenRanks) {
  if (world_size() == 1) return;
  const auto told = std::make_shared<Told>();
  told->send = [](const Tensor& shard) { return GatherExtension::Sent{{world_rank() == 0 ? shard : shard.to(torch::kDouble)}}; };
  EXPECT_THROWS_WITH(sharded_linear(told)(torch::ones({1, 3}).to(test_device())),
                     "sends other tensors on rank 1 of the shard dim than on rank 0");
  torch::nn::Linear differing(3, 8);
  const FullyShardOptions options{.initial_weights = InitialWeights::kUnchecked,
                                  .gather_extension_fn = for_matrices(world_rank() == 0 ? told : nullptr)};
  EXPECT_THROWS_WITH(fully_shard(differing, world_mesh(), options), "the ranks' models or options differ");
}

} // namespace
} // namespace tessera::testing::gather_extension_test
