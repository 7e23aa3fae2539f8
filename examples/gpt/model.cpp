#include "gpt/model.h"

#include <tessera/activations/recompute.h>

#include <algorithm>
#include <cmath>

namespace gpt {
namespace nn = torch::nn;

AttentionImpl::AttentionImpl(const ModelConfig& config) : heads_(config.heads) {
  TORCH_CHECK(config.heads > 0 && config.width % config.heads == 0, "the model's width (", config.width,
              ") must be a multiple of its heads (", config.heads, ")");
  qkv_ = register_module("qkv", nn::Linear(config.width, 3 * config.width));
  projection_ = register_module("projection", nn::Linear(config.width, config.width));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x) {
  const auto batch = x.size(0), time = x.size(1), width = x.size(2);
  const auto parts = qkv_->forward(x).view({batch, time, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
  const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
  return projection_->forward(mixed.transpose(1, 2).reshape({batch, time, width}));
}

namespace {

tessera::MoEOptions moe_options(const ModelConfig& config) {
  tessera::MoEOptions options{.width = config.width,
                              .hidden = std::max<int64_t>(4 * config.width / config.top_k, 1),
                              .experts = config.experts,
                              .kind = tessera::ExpertKind::kGelu};
  options.route.top_k = config.top_k;
  options.losses.balance = config.balance;
  return options;
}

} // namespace

BlockImpl::BlockImpl(const ModelConfig& config) {
  attention_norm_ = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({config.width})));
  attention_ = register_module("attention", Attention(config));
  mlp_norm_ = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({config.width})));
  if (config.experts > 0) {
    moe_ = register_module("moe", tessera::MoE(moe_options(config)));
    return;
  }
  expand_ = register_module("expand", nn::Linear(config.width, 4 * config.width));
  contract_ = register_module("contract", nn::Linear(4 * config.width, config.width));
}

torch::Tensor BlockImpl::forward(torch::Tensor x) {
  x = x + attention_->forward(attention_norm_->forward(x));
  const auto y = mlp_norm_->forward(x);
  return x + (moe_ ? moe_->forward(y) : contract_->forward(torch::gelu(expand_->forward(y))));
}

GptImpl::GptImpl(const ModelConfig& config) : config_(config) {
  token_embedding_ = register_module("token_embedding", nn::Embedding(kVocabulary, config.width));
  position_embedding_ = register_module("position_embedding", nn::Embedding(config.sequence, config.width));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer) blocks_->push_back(Block(config));
  norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({config.width})));
  initialize();
}

torch::Tensor GptImpl::embed(const torch::Tensor& tokens, const torch::Tensor& positions) {
  const auto time = tokens.size(1);
  TORCH_CHECK(time <= config_.sequence, "a context of ", time, " bytes, but the model has positions for ", config_.sequence);
  const auto places = positions.defined() ? positions : torch::arange(time, tokens.options());
  return token_embedding_->forward(tokens) + position_embedding_->forward(places);
}

torch::Tensor GptImpl::forward(const torch::Tensor& tokens, const torch::Tensor& positions) {
  auto x = embed(tokens, positions);
  for (const auto& each : *blocks_) {
    auto& block = *each->as<Block>();
    x = recompute_ ? tessera::recompute(block, x) : block.forward(x);
  }
  return logits(x);
}

// GPT-2's: normal weights, smaller by the depth where a layer writes to the residual stream, and no biases.
void GptImpl::initialize() {
  const double residual_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(config_.layers));
  torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    const auto& name = item.key();
    auto& parameter = item.value();
    if (parameter.dim() == 1) {
      const bool is_scale = name.find("norm.weight") != std::string::npos;
      parameter.fill_(is_scale ? 1.0 : 0.0);
      continue;
    }
    const auto is_of = [&](const char* part) { return name.find(part) != std::string::npos; };
    const bool writes_residual = is_of("projection") || is_of("contract") || is_of("experts.down");
    nn::init::normal_(parameter, 0.0, writes_residual ? 0.02 * residual_scale : 0.02);
  }
}

torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets.flatten());
}

} // namespace gpt
