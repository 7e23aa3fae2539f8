// Grouped queries whose key heads do not divide among the ranks: computed in groups of ranks, beside one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/collectives/run_ranks.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/split_sequence.h>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/autocast.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::testing::shared_key_heads_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kHeads = 12, kSize = 4, kWidth = kHeads * kSize, kRows = 12, kTime = 8, kVocabulary = 29, kMostSteps = 20;
constexpr double kBound = 1e-5;

/// How a block comes from its keys to what they give.
enum class Mixing {
  kGrouped,  ///< attention knows groups
  kRepeated, ///< the module repeats keys for it
  kExpanded, ///< the module expands a view of them for it
  kByHand,   ///< products and a softmax
};

struct NetOptions {
  int64_t key_heads = 2;
  Mixing mixing = Mixing::kGrouped;
  bool has_bias = false, has_key_norm = false, recomputes = false;

  std::string text() const {
    return c10::str(key_heads, " key heads, mixing ", static_cast<int>(mixing), has_bias ? ", biases" : "",
                    has_key_norm ? ", norms of keys" : "", recomputes ? ", recomputed" : "");
  }
};

struct BlockImpl : nn::Module {
  explicit BlockImpl(const NetOptions& own) : options(own) {
    const auto linear = [&](const std::string& name, int64_t out, bool has_bias) {
      return register_module(name, nn::Linear(nn::LinearOptions(kWidth, out).bias(has_bias)));
    };
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    q = linear("q", kWidth, options.has_bias);
    k = linear("k", options.key_heads * kSize, options.has_bias);
    v = linear("v", options.key_heads * kSize, options.has_bias);
    o = linear("o", kWidth, true);
    if (options.has_key_norm) k_norm = register_module("k_norm", nn::LayerNorm(nn::LayerNormOptions({kSize})));
  }
  Tensor mix(const Tensor& x) {
    const auto in_heads = [&](const Tensor& y, int64_t count) {
      return y.view({y.size(0), y.size(1), count, kSize}).transpose(1, 2);
    };
    const auto query = in_heads(q(x), kHeads);
    auto key = in_heads(k(x), options.key_heads), value = in_heads(v(x), options.key_heads);
    if (k_norm) key = k_norm(key);
    const bool is_grouped = options.mixing == Mixing::kGrouped;
    if (!is_grouped) {
      key = repeated(key);
      value = repeated(value);
    }
    if (options.mixing == Mixing::kByHand) return torch::softmax(query.matmul(key.transpose(-2, -1)), -1).matmul(value);
    return at::scaled_dot_product_attention(query, key, value, {}, 0.0, /*is_causal=*/true, std::nullopt, is_grouped);
  }
  Tensor repeated(const Tensor& y) const {
    const auto times = kHeads / options.key_heads;
    if (options.mixing != Mixing::kExpanded) return y.repeat_interleave(times, 1);
    return y.unsqueeze(2).expand({-1, -1, times, -1, -1}).reshape({y.size(0), kHeads, y.size(2), kSize});
  }
  Tensor forward(const Tensor& x) { return x + o(mix(norm(x)).transpose(1, 2).reshape(x.sizes())); }

  NetOptions options;
  nn::LayerNorm norm{nullptr}, k_norm{nullptr};
  nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  explicit NetImpl(const NetOptions& own) : options(own) {
    table = register_module("table", nn::Embedding(kVocabulary, kWidth));
    nn::init::normal_(table->weight, 0.0, 0.1);
    for (const char* name : {"first", "second"}) blocks.emplace_back(register_module(name, Block(options)));
  }
  Tensor forward(const Tensor& tokens) {
    auto x = table(tokens);
    for (auto& block : blocks) x = options.recomputes ? tessera::recompute(*block, x) : block(x);
    return torch::linear(x, table->weight);
  }
  NetOptions options;
  nn::Embedding table{nullptr};
  std::vector<Block> blocks;
};
TORCH_MODULE(Net);

Net seeded(const NetOptions& options) {
  torch::manual_seed(21);
  return Net(options);
}

ParallelPlan plan_of(const NetOptions& options, bool is_sequence) {
  const Placement stream = is_sequence ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"table", VocabParallel{stream}},
                    {"*.q", Colwise{.heads = kHeads}},
                    {"*.[kv]", KeyHeads{options.key_heads}},
                    {"*.o", Rowwise{.output = stream}}};
  if (is_sequence) plan.push_back({"*.norm", Sequence{}});
  return plan;
}

DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

/// Drawn once: ranks that are threads have one generator.
const Tokens& tokens_of(int64_t step) {
  static const auto all = [] {
    std::vector<Tokens> drawn;
    for (int64_t each = 0; each < kMostSteps; ++each) {
      const auto tokens = draw_tokens(each, kRows, kTime);
      drawn.push_back({tokens.inputs.remainder(kVocabulary), tokens.targets.remainder(kVocabulary)});
    }
    return drawn;
  }();
  return all[static_cast<size_t>(step)];
}

Tensor loss_of(Net& net, const Tokens& tokens) {
  return torch::cross_entropy_loss(net(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
}

struct Trained {
  std::vector<double> losses, norms;
  std::vector<Tensor> weights;
};

/// Steps of SGD with clipping on rows `part` of `parts`.
Trained train(Net& net, int64_t part = 0, int64_t parts = 1, int64_t steps = kMostSteps) {
  const torch::AutoGradMode grad_mode(true);
  Trained trained;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int64_t step = 0; step < steps; ++step) {
    const auto& all = tokens_of(step);
    optimizer.zero_grad();
    const auto loss = loss_of(net, {all.inputs.chunk(parts)[part], all.targets.chunk(parts)[part]});
    loss.backward();
    trained.norms.push_back(clip_grad_norm_(*net, 0.5).item<double>());
    optimizer.step();
    trained.losses.push_back(loss.item<double>());
  }
  for (const auto& parameter : net->parameters()) trained.weights.push_back(whole_of(parameter));
  return trained;
}

void expect_same(const Trained& got, const Trained& expected, double bound = kBound) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    ASSERT_NEAR(got.losses[i], expected.losses[i], bound) << "step " << i;
    ASSERT_NEAR(got.norms[i], expected.norms[i], bound) << "step " << i;
  }
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_LE((got.weights[i] - expected.weights[i]).abs().max().item<double>(), bound) << "parameter " << i;
}

/// Every number of heads, with and without what a module may do besides.
std::vector<NetOptions> nets() {
  std::vector<NetOptions> all;
  for (const int64_t heads : {1, 2, 3, 4, 6}) {
    all.push_back({.key_heads = heads});
    all.push_back({.key_heads = heads, .mixing = Mixing::kRepeated, .has_bias = true});
    all.push_back({.key_heads = heads, .mixing = Mixing::kExpanded});
    all.push_back({.key_heads = heads, .has_bias = true, .has_key_norm = true, .recomputes = heads % 2 == 0});
  }
  return all;
}

TEST(SharedKeyHeads, TrainAsInOneProcess) {
  const StrictSharding strict;
  for (const auto& options : sweep(nets(), 3, [](const auto& each) { return each.key_heads == 2 && each.has_key_norm; })) {
    auto twin = seeded(options);
    const auto expected = train(twin);
    for (const bool is_sequence : {false, true}) {
      SCOPED_TRACE(c10::str(options.text(), is_sequence ? ", sequence" : ""));
      auto net = seeded(options);
      parallelize(*net, tensor_mesh(), plan_of(options, is_sequence));
      expect_same(train(net), expected);
    }
  }
}

/// The groups of the ranks that have the same key heads.
int64_t groups_of(int64_t key_heads) { return std::gcd(key_heads, world_size()); }

/// Products and activations of key heads are a part, weights and their checkpoints whole.
TEST(SharedKeyHeads, EachGroupComputesItsOwn) {
  for (const int64_t key_heads : {1, 2, 3, 4, 6}) {
    SCOPED_TRACE(key_heads);
    const NetOptions options{.key_heads = key_heads, .has_bias = true};
    auto twin = seeded(options), net = seeded(options);
    const auto plan = plan_of(options, /*is_sequence=*/false);
    parallelize(*net, tensor_mesh(), plan);
    auto &block = net->blocks[0], &whole = twin->blocks[0];
    torch::manual_seed(5);
    const auto x = torch::randn({kRows, kTime, kWidth});
    const DTensor keys(block->k(x));
    EXPECT_EQ(keys.sizes(), whole->k(x).sizes());
    EXPECT_EQ(keys.local().numel() * groups_of(key_heads), keys.numel());
    EXPECT_TENSORS_CLOSE(whole_of(keys), whole->k(x).detach(), 1e-6, 1e-6);
    if (key_heads % world_size() == 0) continue; // Colwise
    EXPECT_EQ(DTensor(block->k->weight).placements(), Placements{Replicate{}});
    EXPECT_EQ(DTensor(block->k->weight).mesh(), tensor_mesh());
  }
}

/// A step sends what one without groups does: no activation of keys moves, and the gradients of the weights are one all-reduce.
TEST(SharedKeyHeads, MoveNoActivations) {
  const int64_t ranks = world_size();
  for (const auto& [key_heads, is_sharded] :
       std::vector<std::pair<int64_t, bool>>{{1, false}, {2, false}, {6, false}, {2, true}}) {
    if (key_heads % ranks == 0) continue;
    SCOPED_TRACE(c10::str(key_heads, is_sharded ? ", sharded" : ""));
    const StrictSharding strict;
    auto block = seeded({.key_heads = key_heads, .has_bias = true})->blocks[0];
    const auto mesh = init_device_mesh(test_device_type(), {1, ranks}, {"dp", "tp"});
    parallelize(*block, mesh["tp"], {{"q", Colwise{}}, {"[kv]", KeyHeads{key_heads}}, {"o", Rowwise{}}});
    if (is_sharded) fully_shard(*block, mesh["dp"]);
    constexpr int64_t kActivation = kRows * kTime * kWidth * 4;
    const int64_t weights = 2 * key_heads * kSize * (kWidth + 1) * 4;
    for (int step = 0; step < 2; ++step) { // the second one has its communicators
      const auto x = torch::randn({kRows, kTime, kWidth}).requires_grad_();
      const CountCollectives forward;
      const auto loss = block(from_local(x, mesh["tp"], {Replicate{}})).square().mean();
      EXPECT_EQ(forward.total_bytes(), kActivation) << forward.to_string();
      EXPECT_EQ(forward.count(CollectiveKind::kAllReduce).calls, 1);
      const CountCollectives backward;
      loss.backward();
      EXPECT_EQ(backward.count(CollectiveKind::kAllReduce).calls, 2) << backward.to_string();
      EXPECT_EQ(backward.total_bytes(), kActivation + weights) << backward.to_string();
    }
  }
}

/// What has no rule for heads of groups is right, and sends more. StrictSharding names it.
TEST(SharedKeyHeads, AreGatheredWhereAModuleMixesByHand) {
  for (const int64_t key_heads : {1, 2, 3, 6}) {
    const NetOptions options{.key_heads = key_heads, .mixing = Mixing::kByHand, .has_bias = true, .has_key_norm = true};
    SCOPED_TRACE(options.text());
    auto twin = seeded(options), net = seeded(options);
    parallelize(*net, tensor_mesh(), plan_of(options, /*is_sequence=*/false));
    expect_same(train(net, 0, 1, 4), train(twin, 0, 1, 4));
  }
}

TEST(SharedKeyHeads, MeetOthersOfTheSameRanks) {
  if (world_size() != 4) GTEST_SKIP() << "two groups of two ranks";
  auto block = seeded({.key_heads = 2})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"q", Colwise{}}, {"[kv]", KeyHeads{2}}, {"o", Rowwise{}}});
  torch::manual_seed(8);
  const auto x = torch::randn({kRows, kTime, kWidth});
  const auto in_heads = [](const Tensor& y) { return y.unflatten(-1, {-1, kSize}).transpose(1, 2); };
  const auto queries = in_heads(block->q(x)), keys = in_heads(block->k(x));
  const auto both = torch::cat({queries, keys}, 1);
  const auto expected = torch::cat({whole_of(queries), whole_of(keys)}, 1);
  EXPECT_TENSORS_EQUAL(whole_of(both), expected);
  both.square().sum().backward();
  const auto gradient = whole_of(block->k->weight.grad());
  EXPECT_TENSORS_CLOSE(gradient, 2 * torch::einsum("bto,bti->oi", {whole_of(block->k(x)), x}), 1e-4, 1e-5);
  const auto width = torch::ones({kSize}), wide = whole_of(block->k->weight).sum(0);
  EXPECT_TENSORS_CLOSE(whole_of(keys * from_local(width, tensor_mesh(), {Replicate{}})), whole_of(keys), 0, 0);
  EXPECT_TENSORS_CLOSE(whole_of(block->k(x) + block->q(x).narrow(-1, 0, 2 * kSize)),
                       whole_of(block->k(x)) + whole_of(block->q(x)).narrow(-1, 0, 2 * kSize), 1e-6, 1e-6);
  const StrictSharding strict;
  EXPECT_THROWS_WITH(torch::cat({queries, keys}, 1),
                     "it would have to be gathered, and the plan of `parallelize` does not say so");
  EXPECT_THROWS_WITH(block->o(block->k(x).repeat({1, 1, 6})), "would have to become");
  EXPECT_THROWS_WITH(block->q(block->k(x)), "the activation is on DeviceMesh");
}

/// Whoever says where a layer's results go gets them there.
TEST(SharedKeyHeads, GoWhereAPlanSays) {
  auto block = seeded({.key_heads = 2})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{2}}, {"k", PrepareOutput{Replicate{}}}});
  const DTensor keys(block->k(torch::ones({kRows, kTime, kWidth})));
  EXPECT_EQ(keys.mesh(), tensor_mesh());
  EXPECT_EQ(keys.placements(), Placements{Replicate{}});
}

/// Parts of a weight, biases that are none of the module's, and activations that a plan does not make whole.
TEST(SharedKeyHeads, AreReadInOtherWays) {
  if (world_size() != 4) GTEST_SKIP() << "two groups of two ranks";
  auto twin = seeded({.key_heads = 6, .has_bias = true})->blocks[0],
       block = seeded({.key_heads = 6, .has_bias = true})->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{6}}});
  torch::manual_seed(8);
  const auto x = torch::randn({kRows, kTime, kWidth}), bias = torch::randn({6 * kSize});
  const auto expect_alike = [&](const std::function<Tensor(Block&)>& read) {
    const auto got = read(block), expected = read(twin);
    EXPECT_TENSORS_CLOSE(whole_of(got), expected.detach(), 1e-5, 1e-5);
    for (auto* each : {&twin, &block}) (*each)->zero_grad();
    got.square().sum().backward();
    expected.square().sum().backward();
    EXPECT_TENSORS_CLOSE(whole_of(block->k->weight.grad()), twin->k->weight.grad(), 1e-4, 1e-4);
  };
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, each->k->bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight, bias.narrow(0, 0, 1)); });
  expect_alike([&](Block& each) { return torch::addmm(each->k->bias, x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::addmm(bias.unsqueeze(0), x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::mm(x[0], each->k->weight.t()); });
  expect_alike([&](Block& each) { return torch::linear(x[0][0], each->k->weight, each->k->bias); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight.narrow(0, 1, 3)); });
  expect_alike([&](Block& each) { return torch::linear(x, each->k->weight.narrow(0, 2, 8)); });
  expect_alike([&](Block& each) {
    return torch::matmul(x.unsqueeze(1), each->k->weight.view({6, kSize, kWidth}).transpose(1, 2));
  });
  expect_alike([&](Block& each) { return each->k(x) + torch::linear(x, each->k->weight * 2); });
  auto other = seeded({.key_heads = 6})->blocks[0], whole = seeded({.key_heads = 6})->blocks[0];
  parallelize(*other, tensor_mesh(), {{"k", KeyHeads{6}}, {"k", PrepareInput{Shard{1}}}});
  EXPECT_TENSORS_CLOSE(whole_of(other->k(x)), whole->k(x).detach(), 1e-5, 1e-5);
}

struct Sharding {
  NetOptions net;
  bool is_sequence = false, is_on_meta = false;
  FullyShardOptions options = {};
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
  expect_same(trained, expected);
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
        all.push_back({{.key_heads = heads, .has_bias = true, .has_key_norm = true}, is_sequence, false, options});
        all.push_back({{.key_heads = heads, .recomputes = true}, is_sequence, false, options});
      }
    }
  }
  return all;
}

TEST(SharedKeyHeads, AreShardedFurther) {
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

/// dp 2 x tp 4, as threads of this process.
TEST(SharedKeyHeads, AreShardedOnEightRanks) {
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
TEST(SharedKeyHeads, AreWholeBesideWholeQueries) {
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
TEST(SharedKeyHeads, AreComputedBesideSplitSequences) {
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
TEST(SharedKeyHeads, AreStagesOfAPipeline) {
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
TEST(SharedKeyHeads, AreInACheckpointOnce) {
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

/// Beside layers that overlap, and in other precisions.
TEST(SharedKeyHeads, ComputeBesideLayersThatOverlap) {
  const NetOptions options{.key_heads = 2, .has_bias = true, .has_key_norm = true};
  auto twin = seeded(options), net = seeded(options);
  parallelize(*net, tensor_mesh(), plan_of(options, /*is_sequence=*/true), {.overlap = {.when = Overlap::kAlways, .chunks = 2}});
  const StrictSharding strict;
  expect_same(train(net, 0, 1, 5), train(twin, 0, 1, 5));
}

TEST(SharedKeyHeads, ComputeInParamDtype) {
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

TEST(SharedKeyHeads, ComputeUnderAutocast) {
  for (const auto mixing : {Mixing::kGrouped, Mixing::kExpanded}) {
    const NetOptions options{.key_heads = 2, .mixing = mixing, .has_bias = true, .has_key_norm = true};
    auto twin = seeded(options)->blocks[0], block = seeded(options)->blocks[0];
    parallelize(*block, tensor_mesh(), {{"q", Colwise{}}, {"[kv]", KeyHeads{2}}, {"o", Rowwise{}}});
    torch::manual_seed(7);
    const auto x = torch::randn({kRows, kTime, kWidth});
    for (auto* each : {&twin, &block}) {
      const AutocastScope autocast;
      (*each)(x).to(torch::kFloat).square().mean().backward();
    }
    const auto expected = twin->named_parameters();
    for (const auto& item : block->named_parameters()) {
      const auto wanted = expected[item.key()].grad(), got = whole_of(item.value().grad());
      EXPECT_LE((got - wanted).norm().item<double>(), 0.02 * wanted.norm().item<double>() + 1e-4) << item.key();
    }
  }
}

/// Writes between forward and backward are an error, as elsewhere.
TEST(SharedKeyHeads, AreNotWrittenBeforeBackward) {
  for (const bool writes_weight : {false, true}) {
    auto block = seeded({.key_heads = 2})->blocks[0];
    parallelize(*block, tensor_mesh(), {{"[kv]", KeyHeads{2}}});
    const auto x = from_local(torch::ones({kRows, kTime, kWidth}), tensor_mesh(), {Replicate{}}).requires_grad_() * 1;
    const auto loss = block->k(x).square().sum();
    {
      const torch::NoGradGuard no_grad;
      (writes_weight ? block->k->weight : x).add_(1);
    }
    EXPECT_THROWS_WITH(loss.backward(), "modified by an inplace operation");
  }
}

/// The gradient of a gradient.
TEST(SharedKeyHeads, AreDifferentiableTwice) {
  const NetOptions options{.key_heads = 2, .mixing = Mixing::kByHand};
  auto twin = seeded(options)->blocks[0], block = seeded(options)->blocks[0];
  parallelize(*block, tensor_mesh(), {{"k", KeyHeads{2}}});
  torch::manual_seed(9);
  const auto x = torch::randn({kRows, kTime, kWidth});
  std::vector<Tensor> gradients;
  for (auto* each : {&twin, &block}) {
    auto& module = **each;
    const auto loss = module.k(x).pow(3).sum();
    const auto first = torch::autograd::grad({loss}, {module.k->weight}, {}, true, /*create_graph=*/true)[0];
    first.square().sum().backward();
    gradients.push_back(whole_of(module.k->weight.grad()));
  }
  EXPECT_TENSORS_CLOSE(gradients[1], gradients[0], 1e-4, 1e-3);
}

} // namespace
} // namespace tessera::testing::shared_key_heads_test
