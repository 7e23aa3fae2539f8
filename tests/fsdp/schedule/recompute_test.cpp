// Recomputed blocks of sharded models: the same numbers and all-gathers as without, and less memory.

#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/model/sharded_module.h>

#include <tessera/tests/fsdp/held_memory.h>
#include <tessera/tests/fsdp/twin.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/simulated_device/generator.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>

namespace tessera::testing::recompute_test {
namespace {

using torch::Tensor;

/// Where a model recomputes.
enum class Where { kNowhere, kAround, kInside, kAroundTwo, kNested, kWithCall, kWithPolicy };
constexpr std::array kEverywhere{Where::kAround, Where::kInside,   Where::kAroundTwo,
                                 Where::kNested, Where::kWithCall, Where::kWithPolicy};

RecomputeOptions keeps_products() {
  RecomputeOptions options;
  options.keep = [](const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
    const auto& name = op.operator_name().name;
    return name == "aten::mm" || name == "aten::addmm";
  };
  return options;
}

Tensor inside(BlockImpl& block, const Tensor& x) {
  return x + recompute([&](const Tensor& in) { return block.down(torch::gelu(block.up(in))); }, block.norm(x));
}

Tensor run_block(Block& block, const Tensor& x, Where where) {
  switch (where) {
    case Where::kAround: return recompute(block, x);
    case Where::kInside: return inside(*block, x);
    case Where::kNested: return recompute([block](const Tensor& in) mutable { return inside(*block, in); }, x);
    case Where::kWithPolicy: return recompute(keeps_products(), block, x);
    case Where::kWithCall:
      return recompute(
          [block](const Tensor& in) mutable { return is_sharded(*block) ? tessera::call(block, in) : block->forward(in); }, x);
    default: return block->forward(x);
  }
}

Tensor forward(Net& net, const Tensor& tokens, Where where) {
  auto x = net->embedded(tokens);
  std::vector<Block> blocks;
  for (auto& each : *net->blocks) blocks.emplace_back(std::dynamic_pointer_cast<BlockImpl>(each));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool in_pair = where == Where::kAroundTwo && i + 1 < blocks.size() && i % 2 == 0;
    if (in_pair)
      x = recompute([a = blocks[i], b = blocks[i + 1]](const Tensor& in) mutable { return b(a(in)); }, x), ++i;
    else
      x = run_block(blocks[i], x, where);
  }
  return torch::matmul(net->norm(x), net->embed->weight.t());
}

Tensor loss_with(Net& net, const Tensor& tokens, Where where) {
  const auto logits = forward(net, tokens.slice(1, 0, -1), where);
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}),
                                              tokens.slice(1, 1).reshape({-1}).to(logits.device()));
}

struct Trained {
  std::vector<double> losses;
  int64_t all_gathers = 0;
};

Trained train_with(Net& net, Where where) {
  Trained trained;
  const auto count = [&](Net&, int64_t step) {
    if (step == 2) process_context().reset_counters();
    if (step == 3) trained.all_gathers = process_context().count(CollectiveKind::kAllGather).calls;
  };
  const auto loss = [where](Net& each, const Tensor& tokens) { return loss_with(each, tokens, where); };
  trained.losses = train(net, {.count = 4, .loss = loss, .clip = [](Net&) {}, .before = count});
  return trained;
}

TEST(ShardedRecompute, GivesTheNumbersAndTheAllGathersOfAPlainForward) {
  Net plain = make_net();
  const auto expected = train_with(plain, Where::kNowhere);
  const auto all = strategies();
  for (const auto& strategy : all) {
    Net reference = make_net();
    shard_model(reference, strategy);
    const auto without = train_with(reference, Where::kNowhere);
    for (const auto where : kEverywhere) {
      if (where != Where::kAround && where != Where::kWithPolicy && &strategy != all.data()) continue;
      SCOPED_TRACE(strategy.name + ", " + std::to_string(static_cast<int>(where)));
      Net net = make_net();
      shard_model(net, strategy);
      const auto got = train_with(net, where);
      expect_equal_losses(got.losses, expected.losses);
      EXPECT_LT(parameter_difference(*net, *plain), 1e-5);
      // The explicit boundary frees the last block too, which a plain forward leaves open.
      if (where != Where::kWithCall) EXPECT_EQ(got.all_gathers, without.all_gathers);
    }
  }
}

TEST(ShardedRecompute, OfGroupsInsideOfABlockGathersNoMore) {
  const auto run = [](Where where) {
    Net net = make_net();
    for (auto& each : *net->blocks) {
      auto& block = *each->as<Block>();
      fully_shard(*block.up, world_mesh());
      fully_shard(*block.down, world_mesh());
      fully_shard(block, world_mesh());
    }
    fully_shard(*net, world_mesh());
    return train_with(net, where);
  };
  const auto without = run(Where::kNowhere);
  for (const auto where : {Where::kAround, Where::kInside, Where::kAroundTwo, Where::kNested}) {
    const auto got = run(where);
    EXPECT_EQ(got.all_gathers, without.all_gathers) << static_cast<int>(where);
    for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], without.losses[i], 1e-6);
  }
}

TEST(ShardedRecompute, KeepsAutocastOnTheDevice) {
  std::vector<Tensor> gradients;
  for (const auto where : {Where::kNowhere, Where::kAround}) {
    Net net = make_net();
    shard_model(net, strategies()[0]);
    const auto loss = [&] {
      const AutocastScope scope;
      return loss_with(net, own_batch(0), where);
    }();
    loss.backward();
    gradients.push_back(full(net->blocks[0]->as<Block>()->up->weight.grad()).cpu());
  }
  EXPECT_TENSORS_EQUAL(gradients[1], gradients[0]);
}

TEST(ShardedRecompute, DrawsTheSameNumbersFromTheGeneratorOfTheDevice) {
  torch::manual_seed(1);
  std::optional<sim::OwnNumbers> own;
  if (test_device_type() == sim::kDeviceType) own.emplace();
  auto generator = at::globalContext().defaultGenerator(test_device());
  torch::nn::Linear layer(4, 4);
  fully_shard(layer, world_mesh());
  const auto drop = [&](const Tensor& x) {
    const auto y = layer(x);
    return y * torch::empty_like(y).bernoulli_(0.5, generator);
  };
  std::vector<Tensor> gradients;
  for (const bool recomputes : {false, true}) {
    generator.set_current_seed(7);
    const auto x = torch::ones({64, 4}, test_device()).requires_grad_();
    (recomputes ? recompute(drop, x) : drop(x)).sum().backward();
    gradients.push_back(x.grad());
  }
  EXPECT_TENSORS_EQUAL(gradients[1], gradients[0]);
}

TEST(ShardedRecompute, AccumulatesGradients) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  const auto run = [](Net& each, bool sharded, Where where) {
    for (int64_t step = 0; step < 3; ++step) {
      auto tokens = global_batch(step);
      if (sharded) tokens = part_of(tokens, world_rank(), world_size());
      if (sharded) fsdp(*each).set_requires_gradient_sync(step == 2);
      loss_with(each, tokens, where).backward();
    }
  };
  run(plain, false, Where::kNowhere);
  run(net, true, Where::kAround);
  for (const auto& item : net->named_parameters()) {
    EXPECT_TENSORS_CLOSE(full(item.value().grad()), plain->named_parameters()[item.key()].grad());
  }
}

TEST(ShardedRecompute, TakesAShardedParameterAsAnInput) {
  Net plain = make_net(), net = make_net();
  shard_model(net, strategies()[0]);
  const auto run = [](Net& each, const Tensor& x) {
    return recompute([](const Tensor& in, const Tensor& weight) { return in.matmul(weight.t()).tanh(); }, x, each->embed->weight)
        .square()
        .mean();
  };
  auto generator = at::detail::createCPUGenerator(3);
  const auto x = torch::randn({12, 18}, generator);
  run(plain, x).backward();
  run(net, part_of(x, world_rank(), world_size()).to(test_device())).backward();
  EXPECT_TENSORS_CLOSE(full(net->embed->weight.grad()), plain->embed->weight.grad());
}

/// As many blocks are open at once with frozen parameters as with trained ones.
TEST(ShardedRecompute, FreesFrozenGroups) {
  const auto most_open = [](bool frozen, Where where) {
    torch::manual_seed(0);
    Net net(61, 18, 8);
    for (auto& block : *net->blocks) {
      for (auto& parameter : block->parameters()) parameter.requires_grad_(!frozen);
    }
    shard_model(net, strategies()[0]);
    int64_t most = 0;
    const auto count = [&] {
      int64_t open = 0;
      for (auto& block : *net->blocks) open += fsdp(*block).unsharded_bytes() > 0;
      most = std::max(most, open);
    };
    for (int64_t step = 0; step < 2; ++step) {
      auto x = net->embedded(own_batch(step));
      for (auto& each : *net->blocks) {
        Block block(std::dynamic_pointer_cast<BlockImpl>(each));
        x = run_block(block, x, where);
        x.register_hook([&](const Tensor&) { count(); });
      }
      x.square().mean().backward();
    }
    return most;
  };
  for (const auto where : {Where::kNowhere, Where::kAround, Where::kInside, Where::kNested}) {
    EXPECT_LE(most_open(true, where), most_open(false, where) + 1) << static_cast<int>(where);
    if (world_size() > 1) EXPECT_LE(most_open(true, where), 3);
  }
}

/// Writes one buffer with a new version, and one as kernels write running statistics. `constant` may be there or not.
struct WritingImpl : torch::nn::Module {
  explicit WritingImpl(bool has_constant) {
    if (has_constant) constant = register_buffer("constant", torch::ones({3}));
  }
  Tensor forward(const Tensor& x) {
    counted.add_(1);
    silent.data().add_(1);
    const auto y = x * counted.exp() * silent.exp();
    return constant.defined() ? y * constant : y;
  }
  Tensor counted = register_buffer("counted", torch::zeros({3})), silent = register_buffer("silent", torch::zeros({3}));
  Tensor constant;
};

TEST(ShardedRecompute, BlocksTheHostOnceForTheBuffersThatNothingWrites) {
  if (test_device_type() != sim::kDeviceType) GTEST_SKIP() << "the simulated device counts what blocks the host";
  const auto blocks_of = [](const std::function<Tensor()>& forward) {
    sim::synchronize();
    sim::reset_counters();
    forward().sum().backward();
    return sim::counters().synchronized();
  };
  const auto x = torch::ones({2, 3}, test_device()).requires_grad_(true);
  for (const bool has_constant : {false, true}) {
    const auto module = std::make_shared<WritingImpl>(has_constant);
    module->to(test_device());
    const auto recomputed = [&] { return recompute(module, x); };
    recomputed().sum().backward(); // finds out which are written without a new version
    const auto without_buffers = blocks_of([&] { return recompute([&](const Tensor& in) { return module->forward(in); }, x); });
    EXPECT_EQ(blocks_of(recomputed) - without_buffers, has_constant ? 1 : 0);
  }
}

int64_t peak_on_the_simulated_device(const std::function<void()>& work) {
  sim::synchronize();
  sim::reset_counters();
  const auto before = sim::counters().allocated_bytes;
  work();
  return sim::counters().peak_bytes - before;
}

int64_t peak_on_cuda(const std::function<void()>& work) {
  const auto allocated = [] {
    return c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(test_device().index()).allocated_bytes[0];
  };
  c10::getDeviceAllocator(c10::kCUDA)->resetPeakStats(test_device().index());
  const auto before = allocated().current;
  work();
  return allocated().peak - before;
}

int64_t peak_of(const std::function<void()>& work) {
  if (test_device_type() == c10::kCUDA) return peak_on_cuda(work);
  if (!tests_the_cpu()) return peak_on_the_simulated_device(work);
  const HeldMemory held;
  work();
  return held.peak();
}

TEST(ShardedRecompute, HoldsTheActivationsOfOneBlockAndTheInputsOfTheOthers) {
  constexpr int64_t kBlocks = 12, kWidth = 32;
  const int64_t rows = 2048;
  const auto x = torch::randn({rows, kWidth}, test_device());
  const auto input_bytes = static_cast<int64_t>(x.nbytes());
  const auto peak_with = [&](int64_t depth, Where where) {
    torch::manual_seed(0);
    Net net(61, kWidth, depth);
    shard_model(net, strategies()[0]);
    const auto step = [&] {
      auto y = x;
      for (auto& each : *net->blocks) {
        Block block(std::dynamic_pointer_cast<BlockImpl>(each));
        y = run_block(block, y, where);
      }
      y.sum().backward();
    };
    step(); // makes the gradients
    return peak_of(step);
  };
  const auto one = peak_with(1, Where::kNowhere), all = peak_with(kBlocks, Where::kNowhere);
  const auto recomputed = peak_with(kBlocks, Where::kAround);
  RecordProperty("peak", std::to_string(recomputed));
  EXPECT_LE(recomputed, one + (kBlocks - 1) * input_bytes + input_bytes / 2) << one << " for one block, " << all << " without";
  EXPECT_GT(all, 3 * recomputed);
}

/// How a model is sharded and run whose peak is measured.
struct Measured {
  bool with_backward = true;
  int64_t buffers = 2;       ///< of gradients
  bool gathers_ahead = true; ///< in backward
  Strategy strategy = strategies()[0];
};

/// Peak of two steps from the first on, less the root's parameters, in sizes of one of 12 equal blocks.
double blocks_at_peak(const Measured& measured) {
  torch::manual_seed(0);
  Net net(61, /*width=*/256, /*depth=*/12);
  int64_t all = 0, block = 0;
  for (const auto& parameter : net->parameters()) all += static_cast<int64_t>(parameter.nbytes());
  for (const auto& parameter : (*net->blocks)[0]->parameters()) block += static_cast<int64_t>(parameter.nbytes());
  shard_model(net, measured.strategy);
  fsdp(*net).set_reduce_scatter_max_input_buffers(measured.buffers);
  for (const auto& each : *net->blocks) fsdp(*each).set_unshard_in_backward(measured.gathers_ahead);
  const auto tokens = torch::zeros({1, 1}, torch::TensorOptions(test_device()).dtype(torch::kLong)); // activations of some KB
  const auto peak = peak_of([&] {
    for (int step = 0; step < 2; ++step) {
      const auto loss = net->forward(tokens).sum();
      if (measured.with_backward) loss.backward();
      net->zero_grad();
    }
  });
  return static_cast<double>(peak - (all - 12 * block)) / static_cast<double>(block);
}

/// Of blocks, beside the reduced gradients of all 12, which are shards.
void expect_peak(const Measured& measured, double most) {
  if (world_size() == 1) return;
  const auto mesh = measured.strategy.mesh();
  const double gradients = measured.with_backward ? 12.0 / static_cast<double>(mesh.size(mesh.ndim() - 1)) : 0;
  const double blocks = blocks_at_peak(measured) - gradients;
  ::testing::Test::RecordProperty("blocks", std::to_string(blocks));
  EXPECT_LE(blocks, most);
}

/// What gloo receives of a group's gradients, in groups. The first part lies where the reduced gradients will.
double received() { return (world_size() - 2.0) / world_size(); }

// The group that computes and the one that is gathered ahead.
TEST(ShardedMemory, AForwardHoldsTwoGroups) { expect_peak({.with_backward = false}, 2.25); }

// Two groups, their gradients in two reduce buffers, what is received of one, and a gradient that is about to be copied: half a
// block.
TEST(ShardedMemory, ABackwardHoldsTwoGroupsAndTwoReductions) { expect_peak({}, 4.6 + received()); }

TEST(ShardedMemory, ABackwardMayHoldTwoGroupsAndOneReduction) { expect_peak({.buffers = 1}, 3.6 + received()); }

TEST(ShardedMemory, ABackwardMayHoldOneGroupAndOneReduction) {
  expect_peak({.buffers = 1, .gathers_ahead = false}, 2.6 + received());
}

Strategy strategy_named(const std::string& name) {
  for (const auto& each : strategies()) {
    if (each.name == name) return each;
  }
  TORCH_CHECK(false, "no strategy has the name ", name);
}

// Parameters are copied from what is gathered: one group more.
TEST(ShardedMemory, AForwardOfThePerParameterLayoutHoldsOneGroupMore) {
  expect_peak({.with_backward = false, .strategy = strategy_named("full per-parameter")}, 3.25);
}

TEST(ShardedMemory, ABackwardOfThePerParameterLayoutHoldsOneGroupMore) {
  expect_peak({.strategy = strategy_named("full per-parameter")}, 5.6 + received());
}

TEST(ShardedMemory, AModelThatIsKeptAfterForwardIsWholeThen) {
  expect_peak({.with_backward = false, .strategy = strategy_named("kept after forward ragged")}, 12.25);
}

TEST(ShardedMemory, ABackwardOfAHybridMeshHoldsNoMoreThanOfALine) {
  expect_peak({.strategy = strategy_named("hybrid ragged")}, 4.6 + received());
}

Strategy in_half() {
  auto strategy = strategies()[0];
  strategy.options.mixed_precision = {.param_dtype = torch::kBFloat16};
  return strategy;
}

TEST(ShardedMemory, AForwardInHalfPrecisionHoldsHalf) { expect_peak({.with_backward = false, .strategy = in_half()}, 2.25 / 2); }

TEST(ShardedMemory, ABackwardInHalfPrecisionHoldsHalf) { expect_peak({.strategy = in_half()}, (4.6 + received()) / 2); }

TEST(ShardedRecompute, NamesAFunctionWhoseSecondRunDiffersOnEveryRank) {
  Net net = make_net();
  shard_model(net, strategies()[0]);
  const auto tokens = own_batch(0).to(test_device());
  auto x = net->embedded(tokens);
  x = recompute(
      {.name = "the second block"},
      [&net, runs = 0](const Tensor& in) mutable {
        const auto y = runs++ == 0 ? in : in.narrow(0, 0, 1);
        return (*net->blocks)[1]->as<Block>()->forward(y);
      },
      x);
  EXPECT_THROWS_WITH(x.sum().backward(), "recompute of the second block: its second run differs from the first on rank " +
                                             std::to_string(world_rank()));
  Net plain = make_net(); // and training goes on
  const auto expected = train_with(plain, Where::kNowhere), got = train_with(net, Where::kAround);
  for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-5);
}

} // namespace
} // namespace tessera::testing::recompute_test
