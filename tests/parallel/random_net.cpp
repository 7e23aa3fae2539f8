#include "random_net.h"

#include <tessera/activations/recompute.h>

namespace tessera::testing::random_net {

namespace nn = torch::nn;
using torch::Tensor;

namespace {

constexpr int64_t kKeyHeads = 2; ///< of grouped queries

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v) {
  return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, std::nullopt,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}

} // namespace

BlockImpl::BlockImpl(Kind kind, bool bias, int64_t hidden) : kind(kind) {
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
    case Kind::kGrouped:
      q = linear("q", kWidth, kWidth);
      k = linear("k", kWidth, kWidth / kHeads * kKeyHeads);
      v = linear("v", kWidth, kWidth / kHeads * kKeyHeads);
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

Tensor BlockImpl::forward(const Tensor& x) {
  const auto batch = x.size(0), time = x.size(1);
  const auto heads = [&](const Tensor& y) { return y.view({batch, time, -1, kWidth / kHeads}).transpose(1, 2); };
  const auto merged = [&](const Tensor& y) { return y.transpose(1, 2).reshape({batch, time, kWidth}); };
  switch (kind) {
    case Kind::kMlp: return x + down(torch::gelu(up(x)));
    case Kind::kGated: return x + down(torch::silu(gate(x)) * up(x));
    case Kind::kPacked: {
      const auto parts = qkv(x).view({batch, time, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind(0);
      return x + down(merged(attend(parts[0], parts[1], parts[2])));
    }
    case Kind::kGrouped:
    case Kind::kAttention: return x + down(merged(attend(heads(q(x)), heads(k(x)), heads(v(x)))));
    case Kind::kNorm: return norm(x);
    case Kind::kRmsNorm: return x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6) * scale;
    case Kind::kConvolution: return x + down_channels(torch::tanh(up_channels(x.transpose(1, 2)))).transpose(1, 2);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Drawn::Drawn(uint64_t seed, bool splits_sequences) {
  Draw dice(seed);
  std::vector<Kind> kinds{Kind::kMlp,     Kind::kGated, Kind::kPacked,  Kind::kAttention,
                          Kind::kGrouped, Kind::kNorm,  Kind::kRmsNorm, Kind::kConvolution};
  if (splits_sequences) kinds.pop_back();
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

NetImpl::NetImpl(const Drawn& drawn) : recomputes(drawn.recomputes) {
  table = register_module("table", nn::Embedding(kVocabulary, kWidth));
  for (const auto& each : drawn.blocks)
    blocks.emplace_back(register_module("block" + std::to_string(blocks.size()), Block(each.kind, each.bias, each.hidden)));
  if (!drawn.tied) head = register_module("head", nn::Linear(kWidth, kVocabulary));
  to(torch::kDouble);
}

Tensor NetImpl::forward(const Tensor& tokens) {
  auto x = table(tokens);
  for (auto& block : blocks) x = recomputes ? recompute(block, x) : block->forward(x);
  return head ? head(x) : torch::linear(x, table->weight);
}

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
    const bool attends = kind == Kind::kAttention || kind == Kind::kGrouped;
    if (attends) add(path + ".q", Colwise{});
    if (attends) add(path + ".[kv]", kind == Kind::kAttention ? ParallelStyle(Colwise{}) : KeyHeads{kKeyHeads});
    if (gated || attends || kind == Kind::kMlp || kind == Kind::kPacked) add(path + ".down", Rowwise{.output = layout()});
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

OverlapOptions draw_overlap(Draw& dice) {
  OverlapOptions options;
  if (dice.chance(40)) options.when = Overlap::kAlways;
  options.chunks = 1 + dice.below(4);
  return options;
}

void shard_at_random(Net& net, const DeviceMesh& mesh, const FullyShardOptions& options, Draw& dice,
                     const std::function<void(FSDPModule)>& each) {
  const auto shard = [&](auto& module) {
    const auto handle = fully_shard(*module, mesh, options);
    if (each) each(handle);
  };
  for (auto& block : net->blocks) {
    if (dice.chance(60)) shard(block);
  }
  shard(net);
}

} // namespace tessera::testing::random_net
