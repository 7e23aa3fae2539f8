#include "llama/model.h"

#include <string>

namespace llama {
namespace nn = torch::nn;
using torch::Tensor;

namespace {

nn::Linear linear(int64_t from, int64_t to) { return nn::Linear(nn::LinearOptions(from, to).bias(false)); }

/// x [batch, heads, time, head size] by the angles of its positions: pairs are half a head apart.
Tensor rotate(const Tensor& x, const Rotation& rotation) {
  const auto halves = x.chunk(2, -1);
  return x * rotation.cosines + torch::cat({-halves[1], halves[0]}, -1) * rotation.sines;
}

} // namespace

RmsNormImpl::RmsNormImpl(int64_t size, double eps) : eps_(eps) { weight_ = register_parameter("weight", torch::ones({size})); }

Tensor RmsNormImpl::forward(const Tensor& x) { return x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + eps_) * weight_; }

Rotation rotation_at(const Tensor& positions, const Config& config) {
  const auto size = config.head_size();
  const auto exponents = torch::arange(0, size, 2, positions.options().dtype(torch::kDouble)) / static_cast<double>(size);
  const auto angles = torch::outer(positions.to(torch::kDouble), torch::pow(config.rope_theta, -exponents)).repeat({1, 2});
  return {angles.cos().to(torch::kFloat), angles.sin().to(torch::kFloat)};
}

AttentionImpl::AttentionImpl(const Config& config) : head_size_(config.head_size()) {
  TORCH_CHECK(config.hidden_size % config.num_attention_heads == 0 && head_size_ % 2 == 0, "hidden_size ", config.hidden_size,
              " has no ", config.num_attention_heads, " heads of an even size");
  TORCH_CHECK(config.num_attention_heads % config.num_key_value_heads == 0, "num_attention_heads ", config.num_attention_heads,
              " is no multiple of num_key_value_heads ", config.num_key_value_heads);
  q_proj_ = register_module("q_proj", linear(config.hidden_size, config.hidden_size));
  k_proj_ = register_module("k_proj", linear(config.hidden_size, config.num_key_value_heads * head_size_));
  v_proj_ = register_module("v_proj", linear(config.hidden_size, config.num_key_value_heads * head_size_));
  o_proj_ = register_module("o_proj", linear(config.hidden_size, config.hidden_size));
}

Tensor AttentionImpl::forward(const Tensor& x, const Rotation& rotation) {
  const auto heads = [&](const Tensor& y) { return y.unflatten(-1, {-1, head_size_}).transpose(1, 2); };
  const auto query = rotate(heads(q_proj_->forward(x)), rotation), key = rotate(heads(k_proj_->forward(x)), rotation);
  const auto mixed = at::scaled_dot_product_attention(query, key, heads(v_proj_->forward(x)), {}, 0.0, /*is_causal=*/true,
                                                      std::nullopt, /*enable_gqa=*/true);
  return o_proj_->forward(mixed.transpose(1, 2).flatten(2));
}

MlpImpl::MlpImpl(const Config& config) {
  gate_proj_ = register_module("gate_proj", linear(config.hidden_size, config.intermediate_size));
  up_proj_ = register_module("up_proj", linear(config.hidden_size, config.intermediate_size));
  down_proj_ = register_module("down_proj", linear(config.intermediate_size, config.hidden_size));
}

Tensor MlpImpl::forward(const Tensor& x) {
  return down_proj_->forward(torch::silu(gate_proj_->forward(x)) * up_proj_->forward(x));
}

BlockImpl::BlockImpl(const Config& config) {
  self_attn_ = register_module("self_attn", Attention(config));
  mlp_ = register_module("mlp", Mlp(config));
  input_layernorm_ = register_module("input_layernorm", RmsNorm(config.hidden_size, config.rms_norm_eps));
  post_attention_layernorm_ = register_module("post_attention_layernorm", RmsNorm(config.hidden_size, config.rms_norm_eps));
}

Tensor BlockImpl::forward(const Tensor& x, const Rotation& rotation) {
  const auto y = x + self_attn_->forward(input_layernorm_->forward(x), rotation);
  return y + mlp_->forward(post_attention_layernorm_->forward(y));
}

LlamaImpl::LlamaImpl(const Config& config) : config_(config) {
  const auto body = register_module("model", std::make_shared<nn::Module>("LlamaModel"));
  embed_tokens_ = body->register_module("embed_tokens", nn::Embedding(config.vocab_size, config.hidden_size));
  blocks_ = body->register_module("layers", nn::ModuleList());
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) blocks_->push_back(Block(config));
  norm_ = body->register_module("norm", RmsNorm(config.hidden_size, config.rms_norm_eps));
  lm_head_ = register_module("lm_head", linear(config.hidden_size, config.vocab_size));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : parameters()) {
    if (parameter.dim() > 1) nn::init::normal_(parameter, 0.0, 0.02);
  }
}

Tensor LlamaImpl::forward(const Tensor& tokens, const Tensor& positions) {
  const auto rotation = rotation_at(positions.defined() ? positions : torch::arange(tokens.size(1), tokens.options()), config_);
  auto x = embed_tokens_->forward(tokens);
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x, rotation);
  return lm_head_->forward(norm_->forward(x));
}

tessera::ParallelPlan parallel_plan(const Config& config, int64_t ranks, bool sequence_parallel) {
  using tessera::Colwise, tessera::KeyHeads, tessera::Replicate, tessera::Rowwise, tessera::Shard, tessera::VocabParallel;
  std::string fit;
  for (int64_t n = 1; n <= config.num_attention_heads; ++n) {
    if (config.num_attention_heads % n == 0) fit += (fit.empty() ? "" : ", ") + std::to_string(n);
  }
  TORCH_CHECK(config.num_attention_heads % ranks == 0, "num_attention_heads ", config.num_attention_heads,
              " do not divide among ", ranks, " ranks of tp; numbers of ranks that fit: ", fit);
  const tessera::Placement stream = sequence_parallel ? tessera::Placement(Shard{1}) : tessera::Placement(Replicate{});
  tessera::ParallelPlan plan{{"model.embed_tokens", VocabParallel{stream}},
                             {"model.layers.*.self_attn.q_proj", Colwise{.heads = config.num_attention_heads}},
                             {"model.layers.*.self_attn.[kv]_proj", KeyHeads{config.num_key_value_heads}},
                             {"model.layers.*.self_attn.o_proj", Rowwise{.output = stream}},
                             {"model.layers.*.mlp.gate_proj", Colwise{}},
                             {"model.layers.*.mlp.up_proj", Colwise{}},
                             {"model.layers.*.mlp.down_proj", Rowwise{.output = stream}},
                             {"lm_head", VocabParallel{}}};
  if (sequence_parallel)
    plan.insert(plan.end(), {{"model.layers.*.*_layernorm", tessera::Sequence{}}, {"model.norm", tessera::Sequence{}}});
  return plan;
}

} // namespace llama
