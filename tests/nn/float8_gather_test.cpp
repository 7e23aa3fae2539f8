// What is gathered in fp8: weights of Linears in fp8, with the numbers of a training without it, and activations.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/reshard_parameters.h>
#include <tessera/fsdp/unsharded.h>
#include <tessera/nn/float8_linear.h>
#include <tessera/parallel/parallelize.h>

#include <optional>
#include <string>
#include <vector>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/nn/float8_models.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::float8_gather_test {
namespace {

namespace nn = torch::nn;
using float8::line;
using float8::make_mlp;
using float8::Mlp;
using float8::rounded;
using float8::rows_of;
using torch::Tensor;

/// How a training goes that gathers in fp8, and its twin that does not.
struct Case {
  Strategy strategy;
  bool recomputes = false, accumulates = false;
};

/// Those that gather. A group with an extension is laid out per parameter; so is the twin's, whose sums are then the same ones.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& strategy : strategies()) {
    const auto& after = strategy.options.reshard_after_forward;
    if (strategy.replicates || strategy.options.strategy == tessera::Strategy::kNoShard || (after && after->ranks())) continue;
    for (const bool recomputes : {false, true}) {
      for (const bool accumulates : {false, true}) all.push_back({strategy, recomputes, accumulates});
    }
  }
  return all;
}

bool is_plain(const Case& each) { return is_default(each.strategy) && !each.recomputes && !each.accumulates; }

/// Both models, in fp8, sharded alike but for what is gathered.
struct Twins {
  explicit Twins(const Case& tested) {
    auto options = tested.strategy.options;
    for (auto* each : {&coded, &plain}) {
      convert_to_float8(**each, {.except = {"head"}});
      options.gather_extension_fn = each == &coded ? float8_gather(*coded) : nullptr;
      options.layout = each == &coded ? tested.strategy.options.layout : BufferLayout::kPerParameter;
      fully_shard(*(*each)->up, tested.strategy.mesh(), options);
      fully_shard(**each, tested.strategy.mesh(), options);
    }
  }
  Mlp coded = make_mlp(), plain = make_mlp();
};

Tensor run(Mlp& model, const Tensor& x, const Case& tested) {
  const auto forward = [&](const Tensor& input) { return model->forward(input); };
  return tested.recomputes ? recompute(forward, x) : forward(x);
}

void backward(Mlp& model, int64_t step, const Case& tested) {
  if (tested.accumulates) {
    const NoSync accumulates(*model);
    run(model, rows_of(world_rank() + 100 + 10 * step), tested).square().sum().backward();
  }
  run(model, rows_of(world_rank() + 10 * step), tested).square().sum().backward();
}

void expect_same_parameters(Mlp& model, Mlp& plain) {
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_EQ(model->parameters()[i].scalar_type(), torch::kFloat);
    EXPECT_TENSORS_EQUAL(full(model->parameters()[i]), full(plain->parameters()[i]));
  }
}

/// The gather's codes are those of the product.
TEST(Float8Gather, ChangesNoBit) {
  mesh_device_type = torch::kCPU;
  for (const auto& tested : sweep(cases(), 8, is_plain)) {
    SCOPED_TRACE(tested.strategy.name + (tested.recomputes ? ", recomputed" : "") + (tested.accumulates ? ", accumulated" : ""));
    Twins twins(tested);
    torch::optim::SGD optimizer(twins.coded->parameters(), 0.01), plain_optimizer(twins.plain->parameters(), 0.01);
    for (int64_t step = 0; step < 3; ++step) {
      const auto x = rows_of(world_rank() + 10 * step);
      EXPECT_TENSORS_EQUAL(twins.coded->forward(x).detach(), twins.plain->forward(x).detach());
      backward(twins.coded, step, tested);
      backward(twins.plain, step, tested);
      for (size_t i = 0; i < twins.coded->parameters().size(); ++i)
        EXPECT_TENSORS_EQUAL(full(twins.coded->parameters()[i].grad()), full(twins.plain->parameters()[i].grad()));
      optimizer.step();
      plain_optimizer.step();
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
    }
    expect_same_parameters(twins.coded, twins.plain);
  }
}

/// What is saved are the shards in fp32: either of the twins goes on from the other's.
TEST(Float8Gather, ACheckpointHasWholeNumbers) {
  mesh_device_type = torch::kCPU;
  const Case tested{{"full", world_mesh, {}}};
  const SharedFolder folder;
  Twins twins(tested), others(tested);
  torch::optim::SGD optimizer(twins.coded->parameters(), 0.01);
  backward(twins.coded, 0, tested);
  optimizer.step();
  checkpoint::save(state_dict(*twins.coded), folder.path() / "coded");
  checkpoint::load(state_dict(*others.plain), folder.path() / "coded");
  expect_same_parameters(twins.coded, others.plain);
  checkpoint::save(state_dict(*others.plain), folder.path() / "plain");
  checkpoint::load(state_dict(*others.coded), folder.path() / "plain");
  expect_same_parameters(others.coded, twins.coded);
  const auto x = rows_of(7);
  EXPECT_TENSORS_EQUAL(others.coded->forward(x).detach(), twins.coded->forward(x).detach()) << "of the numbers that were loaded";
}

/// A byte an element in place of four.
TEST(Float8Gather, SendsAByteAnElement) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is sent";
  const Case tested{{"full", world_mesh, {.layout = BufferLayout::kPerParameter}}};
  Twins twins(tested);
  const auto gathered = [](Mlp& model) {
    auto handle = fsdp(*model->up);
    handle.unshard(); // the first one tells shapes
    handle.reshard();
    process_context().reset_counters();
    handle.unshard();
    return process_context().count(CollectiveKind::kAllGather).bytes;
  };
  const auto plain = gathered(twins.plain), coded = gathered(twins.coded), saved = plain - coded;
  EXPECT_NEAR(static_cast<double>(saved), 3.0 * 48 * 16, 64.0 * static_cast<double>(world_size())) << "parts begin at multiples";
}

/// One all-reduce for all weights after a step, and none at the gathers; a write that nothing was made after is seen.
TEST(Float8Gather, TakesScalesThatWereMadeTogether) {
  mesh_device_type = torch::kCPU;
  for (const auto& each : sweep(cases(), 6, is_plain)) {
    SCOPED_TRACE(each.strategy.name);
    Twins twins(each);
    torch::optim::SGD optimizer(twins.coded->parameters(), 0.01), plain_optimizer(twins.plain->parameters(), 0.01);
    const auto reductions = [] { return process_context().count(CollectiveKind::kAllReduce).calls; };
    for (int64_t step = 0; step < 4; ++step) {
      process_context().reset_counters();
      if (step != 2) precompute_float8_scales(*twins.coded); // before the first one, and after others but one
      const bool is_hierarchical = each.strategy.options.strategy == tessera::Strategy::kHierarchical;
      if (step != 2) EXPECT_LE(reductions(), is_hierarchical ? 2 : 1); // dims of one rank reduce nothing
      const auto x = rows_of(world_rank() + 10 * step);
      process_context().reset_counters();
      EXPECT_TENSORS_EQUAL(twins.coded->forward(x).detach(), twins.plain->forward(x).detach());
      if (step != 2 && world_size() > 1) EXPECT_EQ(reductions(), 0);
      backward(twins.coded, step, each);
      backward(twins.plain, step, each);
      optimizer.step();
      plain_optimizer.step();
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
    }
    expect_same_parameters(twins.coded, twins.plain);
  }
  auto plain = make_mlp();
  EXPECT_THROWS_WITH(precompute_float8_scales(*plain), "fully_shard has not taken");
  fully_shard(*plain, world_mesh());
  process_context().reset_counters();
  precompute_float8_scales(*plain);
  EXPECT_EQ(process_context().count(CollectiveKind::kAllReduce).calls, 0) << "nothing is gathered in fp8";
}

/// Initializers and checkpoints write weights too.
TEST(Float8Gather, SeesWritesAfterScalesWereMade) {
  mesh_device_type = torch::kCPU;
  Twins twins({{"full", world_mesh, {}}});
  precompute_float8_scales(*twins.coded);
  for (auto* each : {&twins.coded, &twins.plain}) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : (*each)->parameters()) parameter.mul_(1000);
  }
  const auto x = rows_of(0);
  EXPECT_TENSORS_EQUAL(twins.coded->forward(x).detach(), twins.plain->forward(x).detach());
}

/// A group that is made again has other shards, which those scales know nothing of.
TEST(Float8Gather, SeesWritesAfterTheModelWasShardedAgain) {
  mesh_device_type = torch::kCPU;
  Twins twins({{"full", world_mesh, {}}});
  precompute_float8_scales(*twins.coded);
  for (auto* each : {&twins.coded, &twins.plain}) {
    (*each)->up->register_parameter("added", torch::ones({2, 3}));
    EXPECT_FALSE(reshard_parameters(*each).added.empty());
    const torch::NoGradGuard no_grad;
    for (auto& parameter : (*each)->parameters()) parameter.mul_(1000);
  }
  const auto x = rows_of(0);
  EXPECT_TENSORS_EQUAL(twins.coded->forward(x).detach(), twins.plain->forward(x).detach());
}

TEST(Float8Gather, RefusesPartsOfTensorParallelism) {
  if (world_size() != 4) GTEST_SKIP() << "is for two by two ranks";
  const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  auto model = make_mlp();
  convert_to_float8(*model, {.except = {"head"}});
  FullyShardOptions options{.gather_extension_fn = float8_gather(*model)};
  parallelize(*model, mesh["tp"], {{"up", Colwise{}}, {"down", Rowwise{}}});
  EXPECT_THROWS_WITH(fully_shard(*model, mesh["dp"], options), "up.weight is a DTensor over other dims of the mesh");
}

/// The codes are of the shards: with a param_dtype they are rounded once, where a product would code what is rounded already.
TEST(Float8Gather, RoundsAShardOnce) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    auto model = make_mlp();
    convert_to_float8(*model); // of the head with 3 rows a rank may have none
    FullyShardOptions options{.gather_extension_fn = float8_gather(*model)};
    options.mixed_precision.param_dtype = dtype;
    fully_shard(*model, line(), options);
    for (const auto& item : make_mlp()->named_parameters()) {
      const auto read = unsharded(model->named_parameters()[item.key()]).detach();
      const bool is_coded = item.value().dim() > 1;
      const auto value = item.value().detach();
      const auto want = is_coded ? rounded(value, torch::kFloat8_e4m3fn, Float8Scaling::kTensor, 0).to(torch::kFloat) : value;
      EXPECT_TENSORS_EQUAL(read, want.to(dtype)) << item.key();
    }
  }
}

TEST(Float8Gather, RefusesWhatIsNotOneScale) {
  auto model = make_mlp();
  EXPECT_THROWS_WITH(float8_gather(*model), "no Linear in fp8; call convert_to_float8 before");
  convert_to_float8(*model, {Float8Scaling::kRows});
  EXPECT_THROWS_WITH(float8_gather(*model), "a Linear has scales of rows");
}

// Under sequence parallelism each rank encodes its part of a sequence, and the codes are gathered.

constexpr int64_t kWidth = 24, kHidden = 48, kRows = 2;

/// Three layers that read one activation, and one behind them.
struct BlockImpl : nn::Module {
  BlockImpl() {
    const auto add = [&](const char* name, int64_t from, int64_t to, bool bias) {
      return register_module(name, nn::Linear(nn::LinearOptions(from, to).bias(bias)));
    };
    q = add("q", kWidth, kHidden, true);
    k = add("k", kWidth, kHidden, false);
    v = add("v", kWidth, kHidden, false);
    o = add("o", kHidden, kWidth, true);
  }
  Tensor forward(const Tensor& x) {
    const auto y = norm(x);
    return x + o(q(y) + torch::tanh(k(y)) * v(y));
  }
  nn::LayerNorm norm{register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
};
TORCH_MODULE(Block);

Block make_block(at::ScalarType dtype) {
  torch::manual_seed(3);
  Block block;
  block->to(dtype);
  convert_to_float8(*block);
  return block;
}

Tensor numbers(int64_t length, at::ScalarType dtype, uint64_t seed) {
  return torch::randn({kRows, length, kWidth}, at::detail::createCPUGenerator(seed)).to(dtype);
}

ParallelPlan plan() {
  const Shard over_time{1};
  return {{"norm", Sequence{}}, {"q", Colwise{}}, {"k", Colwise{}}, {"v", Colwise{}}, {"o", Rowwise{.output = over_time}}};
}

Tensor whole(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor().detach() : tensor.detach(); }

/// One block on a line of ranks, with its sequence split.
struct Split {
  explicit Split(at::ScalarType dtype) : block(make_block(dtype)), mesh(float8::line()) { parallelize(*block, mesh, plan()); }
  Tensor part(const Tensor& x) const { return distribute_tensor(x, mesh, {Shard{1}}); }
  Block block;
  DeviceMesh mesh;
};

/// The product of two numbers is summed in another order by a rank's part of a weight.
void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  const double unit = got.scalar_type() == torch::kBFloat16 ? 0.02 : 1e-5;
  EXPECT_TENSORS_CLOSE(got, want, unit, unit * want.abs().max().item<double>()) << what;
}

TEST(Float8Sequence, HasTheNumbersOfOneRank) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const int64_t length : {8 * world_size(), 3 * world_size() + 1}) {
      for (const bool recomputes : {false, true}) {
        SCOPED_TRACE(c10::str(dtype, ", ", length, recomputes ? ", recomputed" : ""));
        Split split(dtype);
        auto twin = make_block(dtype);
        const auto x = numbers(length, dtype, 1), weights = numbers(length, dtype, 2);
        const auto input = x.clone().requires_grad_(), part = split.part(x).requires_grad_();
        const auto forward = [&](const Tensor& each) { return split.block->forward(each); };
        const auto want = twin->forward(input), got = recomputes ? recompute(forward, part) : forward(part);
        ASSERT_TRUE(is_dtensor(got));
        EXPECT_EQ(DTensor(got).placements(), (Placements{Shard{1}}));
        expect_near(whole(got), want.detach(), "result");
        (want * weights).sum().backward();
        (got * split.part(weights)).sum().backward();
        expect_near(whole(part.grad()), input.grad(), "input");
        const auto parameters = twin->named_parameters();
        for (const auto& item : split.block->named_parameters())
          expect_near(whole(item.value().grad()), parameters[item.key()].grad(), item.key());
      }
    }
  }
}

/// q, k and v gather once, a byte an element, and so does the gradient of what o gave.
TEST(Float8Sequence, GathersABytePerElement) {
  if (world_size() == 1) GTEST_SKIP() << "nothing is gathered";
  Split split(torch::kBFloat16);
  const auto length = 8 * world_size(), elements = kRows * length * kWidth;
  const auto part = split.part(numbers(length, torch::kBFloat16, 1)).requires_grad_();
  const auto weights = split.part(numbers(length, torch::kBFloat16, 2));
  const auto gathered = [] { return process_context().count(CollectiveKind::kAllGather); };
  process_context().reset_counters();
  const auto y = split.block->forward(part);
  EXPECT_EQ(gathered().calls, 1);
  EXPECT_EQ(gathered().bytes, elements);
  process_context().reset_counters();
  (y * weights).sum().backward();
  EXPECT_EQ(gathered().calls, 2);
  EXPECT_EQ(gathered().bytes, 2 * elements);
  EXPECT_EQ(process_context().count(CollectiveKind::kReduceScatter).calls, 1) << "q's, k's and v's gradients are added first";
}

/// What was gathered of an activation is not taken for that of another one, or of the same one after a write.
TEST(Float8Sequence, SeesWrites) {
  Split split(torch::kFloat);
  auto twin = make_block(torch::kFloat);
  const torch::NoGradGuard no_grad;
  const auto x = numbers(2 * world_size(), torch::kFloat, 1);
  const auto part = split.part(x);
  for (const double factor : {1.0, 3.0, 0.25}) {
    part.mul_(factor);
    x.mul_(factor);
    expect_near(whole(split.block->q->forward(part)), twin->q->forward(x), "q");
    expect_near(whole(split.block->k->forward(part)), twin->k->forward(x), "k");
  }
  const c10::InferenceMode inference;
  expect_near(whole(split.block->q->forward(split.part(x))), twin->q->forward(x), "q of an inference");
}

/// `data()` counts versions of its own, and `local()` is written beside the DTensor.
TEST(Float8Sequence, SeesWritesPastTheVersion) {
  Split split(torch::kFloat);
  auto twin = make_block(torch::kFloat);
  const torch::NoGradGuard no_grad;
  const auto x = numbers(2 * world_size(), torch::kFloat, 1);
  const auto part = split.part(x);
  const auto expect_seen = [&](const Tensor& activation, const char* what) {
    x.mul_(3);
    expect_near(whole(split.block->k->forward(activation)), twin->k->forward(x), what);
  };
  expect_near(whole(split.block->q->forward(part)), twin->q->forward(x), "q");
  part.data().mul_(3);
  expect_seen(part, "of data()");
  DTensor(part).local().mul_(3);
  expect_seen(part, "of local()");
  const auto other = part.data();
  other.mul_(3);
  expect_seen(other, "of what data() returned");
}

/// Scales of rows are those of whole rows and columns: their numbers are gathered.
TEST(Float8Sequence, GathersNumbersForScalesOfRows) {
  Split split(torch::kFloat);
  auto twin = make_block(torch::kFloat);
  convert_to_float8(*split.block, {Float8Scaling::kRows});
  convert_to_float8(*twin, {Float8Scaling::kRows});
  const auto x = numbers(4 * world_size(), torch::kFloat, 1);
  const auto want = twin->forward(x), got = split.block->forward(split.part(x));
  expect_near(whole(got), want.detach(), "result");
  want.sum().backward();
  got.sum().backward();
  const auto parameters = twin->named_parameters();
  for (const auto& item : split.block->named_parameters())
    expect_near(whole(item.value().grad()), parameters[item.key()].grad(), item.key());
}

} // namespace
} // namespace tessera::testing::float8_gather_test
