#include <tessera/plan/models/block.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <optional>

#include <tessera/plan/models/tree.h>

namespace tessera::internal::models {

namespace {

/// [rows, heads, length, head size] by the angles of its positions; the pairs of a rotation are half a head apart.
at::Tensor rotated(const at::Tensor& x, const Surroundings& around) {
  const auto halves = x.chunk(2, -1);
  const auto cosines = around[0].to(x.scalar_type()), sines = around[1].to(x.scalar_type());
  return x * cosines + at::cat({-halves[1], halves[0]}, -1) * sines;
}

/// softmax(query · keyᵀ / √size) · value, one operator after another.
at::Tensor attention_of_products(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const std::optional<at::Tensor>& seen, double dropout) {
  const auto groups = query.size(1) / key.size(1);
  const auto of_heads = [&](const at::Tensor& x) { return groups == 1 ? x : x.repeat_interleave(groups, 1); };
  auto scores = at::matmul(query * (1 / std::sqrt(static_cast<double>(query.size(-1)))), of_heads(key).transpose(-2, -1));
  if (seen) scores = scores.masked_fill(seen->logical_not(), -std::numeric_limits<double>::infinity());
  auto weights = at::softmax(scores, -1);
  if (dropout > 0) weights = at::dropout(weights, dropout, /*train=*/true);
  return at::matmul(weights, of_heads(value));
}

} // namespace

NormImpl::NormImpl(NormKind kind, int64_t width, double epsilon) : kind_(kind), width_(width), epsilon_(epsilon) {
  weight_ = register_parameter("weight", at::ones({width}));
  if (kind == NormKind::kLayer) bias_ = register_parameter("bias", at::zeros({width}));
}

at::Tensor NormImpl::forward(const at::Tensor& x) {
  switch (kind_) {
    case NormKind::kLayer: return at::layer_norm(x, {width_}, weight_, bias_, epsilon_);
    case NormKind::kRms: return at::rms_norm(x, {width_}, weight_, epsilon_);
    case NormKind::kPlainRms: break;
  }
  const auto wide = x.to(at::kFloat);
  const auto normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + epsilon_);
  return normed.to(x.scalar_type()) * weight_;
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::kSilu: return at::silu(x);
    case Activation::kGelu: return at::gelu(x);
    case Activation::kGeluTanh: return at::gelu(x, "tanh");
    case Activation::kRelu: return at::relu(x);
  }
  TORCH_INTERNAL_ASSERT(false, "an unknown activation");
}

BlockImpl::BlockImpl(const BlockConfig& config, const BlockNames& names) : config_(config) {
  const auto width = config.width, inner = config.heads * config.head_size, key_inner = config.key_heads * config.head_size;
  const auto add = [&](const std::string& path, int64_t from, int64_t to, bool bias) {
    return put(*this, path, linear(from, to, bias));
  };
  const auto add_norm = [&](const std::string& path) { return put(*this, path, Norm(config.norm, width, config.norm_epsilon)); };
  attention_norm_ = add_norm(names.attention_norm);
  if (names.packed.empty()) {
    query_ = add(names.query, width, inner, config.query_bias);
    key_ = add(names.key, width, key_inner, config.query_bias);
    value_ = add(names.value, width, key_inner, config.query_bias);
  } else {
    packed_ = add(names.packed, width, inner + 2 * key_inner, config.query_bias);
  }
  output_ = add(names.output, inner, width, config.output_bias);
  feed_forward_norm_ = add_norm(names.feed_forward_norm);
  if (config.experts > 0) {
    MoEOptions options{.width = width, .hidden = config.hidden, .experts = config.experts};
    options.route.top_k = config.top_k;
    mixture_ = put(*this, names.mixture, MoE(options));
    return;
  }
  if (config.is_gated) gate_ = add(names.gate, width, config.hidden, config.feed_forward_bias);
  up_ = add(names.up, width, config.hidden, config.feed_forward_bias);
  down_ = add(names.down, config.hidden, width, config.feed_forward_bias);
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const Surroundings& around) {
  if (config_.norm_first) {
    const auto y = x + dropped(attention(attention_norm_->forward(x), around));
    return y + dropped(feed_forward(feed_forward_norm_->forward(y)));
  }
  const auto y = attention_norm_->forward(x + dropped(attention(x, around)));
  return feed_forward_norm_->forward(y + dropped(feed_forward(y)));
}

at::Tensor BlockImpl::dropped(const at::Tensor& x) const {
  return config_.dropout > 0 && is_training() ? at::dropout(x, config_.dropout, /*train=*/true) : x;
}

at::Tensor BlockImpl::heads_of(const at::Tensor& x) const { return x.unflatten(-1, {-1, config_.head_size}).transpose(1, 2); }

at::Tensor BlockImpl::attention(const at::Tensor& x, const Surroundings& around) {
  std::vector<at::Tensor> parts = packed_ ? packed_->forward(x).chunk(3, -1)
                                          : std::vector<at::Tensor>{query_->forward(x), key_->forward(x), value_->forward(x)};
  auto query = heads_of(parts[0]), key = heads_of(parts[1]);
  const auto value = heads_of(parts[2]);
  if (around.size() >= 2) {
    query = rotated(query, around);
    key = rotated(key, around);
  }
  const auto mask = around.size() % 2 == 1 ? std::optional(around.back()) : std::nullopt;
  const double dropout = is_training() ? config_.attention_dropout : 0;
  if (!config_.fuses_attention) {
    const auto length = query.size(2);
    const auto ones = [&] { return at::ones({length, length}, at::TensorOptions(at::kBool).device(query.device())); };
    const auto seen = mask || !config_.is_causal ? mask : std::optional(ones().tril());
    return output_->forward(attention_of_products(query, key, value, seen, dropout).transpose(1, 2).flatten(2));
  }
  const auto mixed = at::scaled_dot_product_attention(query, key, value, mask, dropout, config_.is_causal && !mask, std::nullopt,
                                                      /*enable_gqa=*/config_.key_heads != config_.heads);
  return output_->forward(mixed.transpose(1, 2).flatten(2));
}

at::Tensor BlockImpl::feed_forward(const at::Tensor& x) {
  if (mixture_) return mixture_->forward(x);
  const auto up = up_->forward(x);
  if (!gate_) return down_->forward(activate(config_.activation, up));
  return down_->forward(activate(config_.activation, gate_->forward(x)) * up);
}

} // namespace tessera::internal::models
