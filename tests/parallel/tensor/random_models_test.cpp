// Random models under random plans on random meshes, beside one process: whatever a plan says, the numbers are the same.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/fully_shard.h>

#include <tessera/tests/fsdp/parallel_mlp.h>
#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>

#include <numeric>
#include <string>
#include <vector>

namespace tessera::testing::random_models_test {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kWidth = 24, kHeads = 12, kVocabulary = 30;

enum class Kind { kMlp, kGated, kPacked, kAttention, kNorm, kRmsNorm, kConvolution };

/// One block on a stream [batch, time, width].
struct BlockImpl : nn::Module {
  BlockImpl(Kind kind, bool bias, int64_t hidden) : kind(kind) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, nn::Linear(nn::LinearOptions(in, out).bias(bias)));
    };
    switch (kind) {
      case Kind::kGated: gate = linear("gate", kWidth, hidden); [[fallthrough]];
      case Kind::kMlp:
        up = linear("up", kWidth, hidden);
        down = linear("down", hidden, kWidth);
        break;
      case Kind::kPacked:
        qkv = linear("qkv", kWidth, 3 * kWidth);
        down = linear("down", kWidth, kWidth);
        break;
      case Kind::kAttention:
        q = linear("q", kWidth, kWidth);
        k = linear("k", kWidth, kWidth);
        v = linear("v", kWidth, kWidth);
        down = linear("down", kWidth, kWidth);
        break;
      case Kind::kNorm: norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth}))); break;
      case Kind::kRmsNorm: scale = register_parameter("scale", torch::rand({kWidth}) + 0.5); break;
      case Kind::kConvolution:
        up_channels = register_module("up_channels", nn::Conv1d(nn::Conv1dOptions(kWidth, hidden, 1).bias(bias)));
        down_channels = register_module("down_channels", nn::Conv1d(nn::Conv1dOptions(hidden, kWidth, 1).bias(bias)));
        break;
    }
  }

  static Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
  }
  Tensor forward(const Tensor& x) {
    const auto batch = x.size(0), time = x.size(1);
    const auto heads = [&](const Tensor& y) { return y.view({batch, time, kHeads, kWidth / kHeads}).transpose(1, 2); };
    const auto merged = [&](const Tensor& y) { return y.transpose(1, 2).reshape({batch, time, kWidth}); };
    switch (kind) {
      case Kind::kMlp: return x + down(torch::gelu(up(x)));
      case Kind::kGated: return x + down(torch::silu(gate(x)) * up(x));
      case Kind::kPacked: {
        const auto parts = qkv(x).view({batch, time, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
        return x + down(merged(attend(parts[0], parts[1], parts[2])));
      }
      case Kind::kAttention: return x + down(merged(attend(heads(q(x)), heads(k(x)), heads(v(x)))));
      case Kind::kNorm: return norm(x);
      case Kind::kRmsNorm: return x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6) * scale;
      case Kind::kConvolution: return x + down_channels(torch::tanh(up_channels(x.transpose(1, 2)))).transpose(1, 2);
    }
    TORCH_INTERNAL_ASSERT(false);
  }

  Kind kind;
  nn::Linear up{nullptr}, down{nullptr}, gate{nullptr}, qkv{nullptr}, q{nullptr}, k{nullptr}, v{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Conv1d up_channels{nullptr}, down_channels{nullptr};
  Tensor scale;
};
TORCH_MODULE(Block);

/// What a case draws, the same on all ranks.
struct Drawn {
  explicit Drawn(uint64_t seed) {
    Draw dice(seed);
    static const std::vector<Kind> kinds{Kind::kMlp,  Kind::kGated,   Kind::kPacked,     Kind::kAttention,
                                         Kind::kNorm, Kind::kRmsNorm, Kind::kConvolution};
    const auto count = 1 + dice.below(4);
    for (int64_t i = 0; i < count; ++i) blocks.push_back({dice.of(kinds), dice.chance(60), 12 * (1 + dice.below(2))});
    tied = dice.chance(40);
    freezes = dice.chance(30);
    recomputes = dice.chance(30);
    shards = dice.chance(60);
    time = dice.of(std::vector<int64_t>{1, 2, 5, 8});
    smoothing = dice.chance(30) ? 0.1 : 0.0;
    ignores = dice.chance(30);
  }
  struct BlockOptions {
    Kind kind;
    bool bias;
    int64_t hidden;
  };
  std::vector<BlockOptions> blocks;
  bool tied, freezes, recomputes, shards, ignores;
  int64_t time;
  double smoothing;
};

struct NetImpl : nn::Module {
  explicit NetImpl(const Drawn& drawn) : recomputes(drawn.recomputes) {
    table = register_module("table", nn::Embedding(kVocabulary, kWidth));
    for (const auto& each : drawn.blocks)
      blocks.emplace_back(register_module("block" + std::to_string(blocks.size()), Block(each.kind, each.bias, each.hidden)));
    if (!drawn.tied) head = register_module("head", nn::Linear(kWidth, kVocabulary));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& tokens) {
    auto x = table(tokens);
    for (auto& block : blocks) x = recomputes ? recompute(block, x) : block->forward(x);
    return head ? head(x) : torch::linear(x, table->weight);
  }
  bool recomputes;
  nn::Embedding table{nullptr};
  std::vector<Block> blocks;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

Net make_net(const Drawn& drawn, uint64_t seed) {
  torch::manual_seed(static_cast<int64_t>(seed));
  Net net(drawn);
  Draw dice(seed + 1);
  for (auto& parameter : net->parameters()) {
    if (drawn.freezes && dice.chance(30)) parameter.requires_grad_(false);
  }
  net->table->weight.requires_grad_(true); // something trains
  return net;
}

/// Styles that fit, in every combination: also such as no one would choose.
ParallelPlan draw_plan(const Drawn& drawn, int64_t ranks, Draw& dice) {
  const std::vector<Placement> layouts{Replicate{}, Replicate{}, Shard{1}, Shard{1}, Shard{0}, Shard{-1}};
  const Placement stream = dice.of(layouts);
  const auto layout = [&] { return dice.chance(80) ? stream : dice.of(layouts); };
  ParallelPlan plan;
  const auto add = [&](const std::string& module, const ParallelStyle& style) {
    if (dice.chance(85)) plan.push_back({module, style});
  };
  add("table", dice.chance(70) ? ParallelStyle(VocabParallel{layout()}) : ParallelStyle(Replicated{}));
  if (!drawn.tied) add("head", dice.chance(50) && kVocabulary % ranks == 0 ? ParallelStyle(Colwise{}) : VocabParallel{});
  for (size_t i = 0; i < drawn.blocks.size(); ++i) {
    const auto path = "block" + std::to_string(i);
    const auto kind = drawn.blocks[i].kind;
    const bool gated = kind == Kind::kGated;
    if (gated) add(path + ".gate", Colwise{});
    if (gated || kind == Kind::kMlp) add(path + ".up", dice.chance(85) ? Colwise{} : Colwise{.output = Replicate{}});
    if (kind == Kind::kPacked) add(path + ".qkv", Colwise{.packed = 3});
    if (kind == Kind::kAttention) add(path + ".[qkv]", Colwise{});
    if (gated || kind == Kind::kMlp || kind == Kind::kPacked || kind == Kind::kAttention)
      add(path + ".down", Rowwise{.output = layout()});
    if (kind == Kind::kNorm)
      add(path + ".norm", dice.chance(70) ? ParallelStyle(Sequence{}) : ParallelStyle(PrepareInput{layout()}));
    if (kind == Kind::kRmsNorm) add(path, Sequence{});
    if (kind == Kind::kConvolution) {
      add(path + ".up_channels", Colwise{});
      add(path + ".down_channels", Rowwise{});
    }
  }
  return plan;
}

void shard(Net& net, const Drawn& drawn, const ParallelMesh& mesh, Draw& dice) {
  if (!drawn.shards && mesh.data_ranks() == 1) return;
  FullyShardOptions options;
  options.layout = dice.chance(50) ? BufferLayout::kRagged : BufferLayout::kPerParameter;
  if (dice.chance(30)) options.reshard_after_forward = false;
  for (auto& block : net->blocks) {
    if (dice.chance(60)) fully_shard(*block, mesh.data_parallel, options);
  }
  fully_shard(*net, mesh.data_parallel, options);
}

Tensor loss_of(Net& net, const Drawn& drawn, const Tensor& tokens, const Tensor& targets) {
  return torch::cross_entropy_loss(net->forward(tokens).flatten(0, 1), targets.flatten(), {}, at::Reduction::Mean, -100,
                                   drawn.smoothing);
}

/// Two backwards into one gradient.
void run_case(uint64_t seed) {
  const Drawn drawn(seed);
  Draw dice(seed + 2);
  const ParallelMesh mesh(dice.of(parallel_shapes()));
  const auto plan = draw_plan(drawn, mesh.tensor_parallel.size(), dice);
  SCOPED_TRACE(c10::str("case ", seed, " on ", mesh.all.to_string(), "\n", to_string(plan)));
  auto twin = make_net(drawn, seed), net = make_net(drawn, seed);
  parallelize(*net, mesh.tensor_parallel, plan);
  shard(net, drawn, mesh, dice);
  for (const int64_t step : {0, 1}) {
    torch::manual_seed(static_cast<int64_t>(seed) + step);
    const auto tokens = torch::randint(kVocabulary, {12, drawn.time}, torch::kLong);
    auto targets = torch::randint(kVocabulary, {12, drawn.time}, torch::kLong);
    if (drawn.ignores) targets.slice(1, 0, 1).fill_(-100); // as many on each rank
    if (drawn.ignores && drawn.time == 1) targets.random_(kVocabulary);
    const auto rank = mesh.data_rank(), ranks = mesh.data_ranks();
    const auto expected = loss_of(twin, drawn, tokens, targets);
    const auto part = loss_of(twin, drawn, tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]).item<double>();
    const auto loss = loss_of(net, drawn, tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank]);
    ASSERT_NEAR(loss.item<double>(), part, 1e-10);
    expected.backward();
    loss.backward();
  }
  const auto expected = twin->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const auto &gradient = item.value().grad(), &wanted = expected[item.key()].grad();
    ASSERT_EQ(gradient.defined(), wanted.defined()) << item.key();
    if (!wanted.defined()) continue;
    EXPECT_EQ(DTensor(gradient).placements(), DTensor(item.value()).placements()) << item.key();
    EXPECT_TENSORS_CLOSE(whole_of(gradient), wanted, 1e-8, 1e-11) << item.key();
  }
}

TEST(RandomParallelModels, GiveTheNumbersOfOneProcess) {
  std::vector<uint64_t> seeds(300);
  std::iota(seeds.begin(), seeds.end(), uint64_t{0});
  for (const auto seed : sweep(seeds, 25)) {
    run_case(seed);
    if (::testing::Test::HasFatalFailure() || ::testing::Test::HasNonfatalFailure()) return;
  }
}

} // namespace
} // namespace tessera::testing::random_models_test
