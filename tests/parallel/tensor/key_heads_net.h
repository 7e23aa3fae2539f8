#pragma once

// A small net of grouped queries whose key heads do not divide among the ranks, and how it trains.

#include <torch/torch.h>

#include <tessera/activations/recompute.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/nn/float8_linear.h>

#include <tessera/tests/parallel/parallel_gpt.h>
#include <tessera/tests/support/matchers.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing::key_heads {

namespace nn = torch::nn;
using torch::Tensor;

inline constexpr int64_t kHeads = 12, kSize = 4, kWidth = kHeads * kSize, kRows = 12, kTime = 8, kVocabulary = 29,
                         kMostSteps = 20;
inline constexpr double kBound = 1e-5;

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
  std::optional<Float8Scaling> float8 = std::nullopt; ///< linear layers multiply in fp8

  std::string text() const {
    return c10::str(key_heads, " key heads, mixing ", static_cast<int>(mixing), has_bias ? ", biases" : "",
                    has_key_norm ? ", norms of keys" : "", recomputes ? ", recomputed" : "",
                    !float8                             ? ""
                    : *float8 == Float8Scaling::kTensor ? ", fp8"
                                                        : ", fp8 by rows");
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

inline Net seeded(const NetOptions& options) {
  torch::manual_seed(21);
  Net net(options);
  if (options.float8) convert_to_float8(*net, {.scaling = *options.float8});
  return net;
}

inline ParallelPlan plan_of(const NetOptions& options, bool is_sequence) {
  const Placement stream = is_sequence ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"table", VocabParallel{stream}},
                    {"*.q", Colwise{.heads = kHeads}},
                    {"*.[kv]", KeyHeads{options.key_heads}},
                    {"*.o", Rowwise{.output = stream}}};
  if (is_sequence) plan.push_back({"*.norm", Sequence{}});
  return plan;
}

inline DeviceMesh tensor_mesh() { return init_device_mesh(test_device_type(), {world_size()}, {"tp"}); }

/// Drawn once: ranks that are threads have one generator.
inline const Tokens& tokens_of(int64_t step) {
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

inline Tensor loss_of(Net& net, const Tokens& tokens) {
  return torch::cross_entropy_loss(net(tokens.inputs).flatten(0, 1), tokens.targets.flatten());
}

struct Trained {
  std::vector<double> losses, norms;
  std::vector<Tensor> weights;
};

/// The mean of what several backwards have added: as ranks average, of which each has a gradient that is not divided. In fp8 that
/// is another number, where the divisor is no power of two.
inline void average_gradients(Net& net, int64_t count) {
  if (count == 1) return;
  for (auto& parameter : net->parameters()) parameter.mutable_grad().div_(count);
}

/// Steps of SGD with clipping on rows `part` of `parts`, in so many micro-batches.
inline Trained train(Net& net, int64_t part = 0, int64_t parts = 1, int64_t steps = kMostSteps, int64_t micro_batches = 1) {
  const torch::AutoGradMode grad_mode(true);
  Trained trained;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int64_t step = 0; step < steps; ++step) {
    const auto& all = tokens_of(step);
    optimizer.zero_grad();
    double loss = 0;
    for (int64_t i = 0; i < micro_batches; ++i) {
      const auto rows = part * micro_batches + i, all_rows = parts * micro_batches;
      const auto own = loss_of(net, {all.inputs.chunk(all_rows)[rows], all.targets.chunk(all_rows)[rows]});
      own.backward();
      loss += own.item<double>() / static_cast<double>(micro_batches);
    }
    average_gradients(net, micro_batches);
    trained.norms.push_back(clip_grad_norm_(*net, 0.5).item<double>());
    optimizer.step();
    trained.losses.push_back(loss);
  }
  for (const auto& parameter : net->parameters()) trained.weights.push_back(whole_of(parameter));
  return trained;
}

inline void expect_same(const Trained& got, const Trained& expected, double bound = kBound) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    ASSERT_NEAR(got.losses[i], expected.losses[i], bound) << "step " << i;
    ASSERT_NEAR(got.norms[i], expected.norms[i], bound) << "step " << i;
  }
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_LE((got.weights[i] - expected.weights[i]).abs().max().item<double>(), bound) << "parameter " << i;
}

} // namespace tessera::testing::key_heads
