#include <tessera/plan/models/transformer.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include <tessera/activations/recompute.h>
#include <tessera/plan/models/tree.h>

namespace tessera::internal::models {

at::Tensor run_block(const Block& block, const at::Tensor& x, const Surroundings& around, const PassSettings& pass) {
  return pass.recompute ? recompute(pass.recompute_options(), block, x, around) : Block(block)->forward(x, around);
}

TransformerImpl::TransformerImpl(TransformerConfig config) : config_(std::move(config)) {
  add_embeddings();
  auto list = put(*this, config_.names.blocks, torch::nn::ModuleList());
  for (int64_t i = 0; i < config_.layers; ++i) {
    blocks_.emplace_back(config_.block, config_.block_names);
    list->push_back(blocks_.back());
  }
  if (config_.has_norm)
    norm_ = put(*this, config_.names.norm, Norm(config_.block.norm, config_.block.width, config_.block.norm_epsilon));
  add_head();
  draw_weights();
}

void TransformerImpl::add_embeddings() {
  const auto& names = config_.names;
  const auto width = config_.block.width;
  const auto table = [&](const std::string& path, int64_t rows) { return put(*this, path, torch::nn::Embedding(rows, width)); };
  if (config_.takes_pictures()) {
    first_ = put_parameter(*this, names.first, at::zeros({1, 1, width}));
    picture_positions_ = put_parameter(*this, names.positions, at::zeros({1, config_.length(0), width}));
    patches_ = put(*this, names.patches,
                   torch::nn::Conv2d(torch::nn::Conv2dOptions(config_.channels, width, config_.patch).stride(config_.patch)));
    return;
  }
  tokens_ = table(names.tokens, config_.vocabulary);
  if (config_.positions > 0) positions_ = table(names.positions, config_.positions);
  if (config_.kinds > 0) kinds_ = table(names.kinds, config_.kinds);
  if (config_.has_embedding_norm)
    embedding_norm_ = put(*this, names.embedding_norm, Norm(config_.block.norm, width, config_.block.norm_epsilon));
}

void TransformerImpl::add_head() {
  const auto& names = config_.names;
  const auto width = config_.block.width;
  if (config_.head == Head::kMasked || config_.head == Head::kPooled)
    head_dense_ = put(*this, names.head_dense, linear(width, width, true));
  if (config_.head == Head::kMasked) {
    head_norm_ = put(*this, names.head_norm, Norm(config_.block.norm, width, config_.block.norm_epsilon));
    head_bias_ = put_parameter(*this, names.head_bias, at::zeros({config_.vocabulary}));
  }
  if (config_.head == Head::kClassifier) head_ = put(*this, names.head, linear(width, config_.classes, true));
  if (config_.head == Head::kLanguage && !config_.is_tied)
    head_ = put(*this, names.head, linear(width, config_.vocabulary, false));
}

void TransformerImpl::draw_weights() {
  const at::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    const bool is_of_mixture =
        !config_.block_names.mixture.empty() && item.key().find(config_.block_names.mixture) != std::string::npos;
    if (item.value().dim() > 1 && !is_of_mixture) item.value().normal_(0, 0.02);
  }
}

at::Tensor TransformerImpl::embed_pictures(const at::Tensor& pictures) {
  const auto patches = patches_->forward(pictures).flatten(2).transpose(1, 2);
  return at::cat({first_.expand({patches.size(0), 1, patches.size(2)}), patches}, 1) + picture_positions_;
}

at::Tensor TransformerImpl::embed(const at::Tensor& input, const at::Tensor& positions) {
  auto x = config_.takes_pictures() ? embed_pictures(input) : tokens_->forward(input);
  if (positions_) x = x + positions_->forward(positions);
  if (kinds_) x = x + kinds_->forward(at::zeros({1}, positions.options()));
  if (embedding_norm_) x = embedding_norm_->forward(x);
  return config_.block.dropout > 0 && is_training() ? at::dropout(x, config_.block.dropout, /*train=*/true) : x;
}

Surroundings TransformerImpl::surroundings(const at::Tensor& positions) const {
  Surroundings around;
  if (config_.rotary_base > 0) {
    const auto size = config_.block.head_size;
    const auto exponents = at::arange(0, size, 2, positions.options().dtype(at::kDouble)) / static_cast<double>(size);
    const auto angles = at::outer(positions.to(at::kDouble), at::pow(config_.rotary_base, -exponents)).repeat({1, 2});
    around = {angles.cos().to(at::kFloat), angles.sin().to(at::kFloat)};
  }
  const auto window = config_.block.window;
  if (window > 0 && positions.numel() > window) {
    const auto distance = positions.unsqueeze(1) - positions.unsqueeze(0);
    around.push_back(distance.ge(0).logical_and(distance.lt(window)));
  }
  return around;
}

at::Tensor TransformerImpl::finish(const at::Tensor& x) {
  auto y = norm_ ? norm_->forward(x) : x;
  switch (config_.head) {
    case Head::kNone: return y;
    case Head::kLanguage: return head_ ? head_->forward(y) : at::linear(y, tokens_->weight);
    case Head::kPooled: return at::tanh(head_dense_->forward(y.select(1, 0)));
    case Head::kClassifier: return head_->forward(y.select(1, 0));
    case Head::kMasked: {
      const auto dense = head_norm_->forward(activate(config_.block.activation, head_dense_->forward(y)));
      return at::linear(dense, tokens_->weight, head_bias_);
    }
  }
  TORCH_INTERNAL_ASSERT(false, "an unknown head");
}

at::Tensor TransformerImpl::forward(const at::Tensor& input, const at::Tensor& positions, const PassSettings& pass) {
  const auto length = config_.takes_pictures() ? 1 : input.size(1);
  const auto places = positions.defined() ? positions : at::arange(length, input.options().dtype(at::kLong));
  auto x = embed(input, places);
  const auto around = surroundings(places);
  for (const auto& block : blocks_) x = run_block(block, x, around, pass);
  return finish(x);
}

std::vector<std::string> TransformerImpl::embedding_members() const {
  const auto& names = config_.names;
  std::vector<std::string> members;
  for (const auto& name : {names.tokens, names.positions, names.kinds, names.embedding_norm, names.patches, names.first}) {
    if (!name.empty()) members.push_back(name);
  }
  return members;
}

std::vector<std::string> TransformerImpl::head_members() const {
  const auto& names = config_.names;
  std::vector<std::string> members;
  if (config_.has_norm) members.push_back(names.norm);
  if (head_) members.push_back(names.head);
  if (head_dense_) members.push_back(names.head_dense);
  if (head_norm_) members.insert(members.end(), {names.head_norm, names.head_bias});
  if (config_.is_tied) members.push_back(names.tokens);
  return members;
}

} // namespace tessera::internal::models
