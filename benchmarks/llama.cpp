#include "llama.h"

#include <torch/library.h>

#include <cmath>

namespace tessera::benchmarks {

namespace {

/// The shapes of the operators that have kernels for the meta device in Python alone.
torch::Tensor embedding_shape(const torch::Tensor& weight, const torch::Tensor& indices, int64_t, bool, bool) {
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return torch::empty(sizes, weight.options());
}

torch::Tensor embedding_gradient_shape(const torch::Tensor& gradient, const torch::Tensor&, int64_t rows, int64_t, bool) {
  return torch::empty({rows, gradient.size(-1)}, gradient.options());
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("embedding", embedding_shape);
  library.impl("embedding_dense_backward", embedding_gradient_shape);
}

using torch::Tensor;
using torch::nn::Linear;

Tensor rms_norm(const Tensor& x, const Tensor& scale) {
  return x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-5) * scale;
}

Linear linear(int64_t from, int64_t to) { return Linear(torch::nn::LinearOptions(from, to).bias(false)); }

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const LlamaShape& shape) : shape_(shape) {
    const int64_t key_width = shape.width / shape.heads * shape.key_heads;
    attention_scale_ = register_parameter("attention_norm", torch::ones({shape.width}));
    query_ = register_module("query", linear(shape.width, shape.width));
    key_ = register_module("key", linear(shape.width, key_width));
    value_ = register_module("value", linear(shape.width, key_width));
    output_ = register_module("output", linear(shape.width, shape.width));
    feed_forward_scale_ = register_parameter("feed_forward_norm", torch::ones({shape.width}));
    gate_ = register_module("gate", linear(shape.width, shape.hidden));
    up_ = register_module("up", linear(shape.width, shape.hidden));
    down_ = register_module("down", linear(shape.hidden, shape.width));
  }

  Tensor forward(const Tensor& input) {
    const auto x = input + attention(rms_norm(input, attention_scale_));
    const auto y = rms_norm(x, feed_forward_scale_);
    return x + down_->forward(torch::silu(gate_->forward(y)) * up_->forward(y));
  }

 private:
  /// [batch, heads, length, width of a head]
  Tensor heads(const Tensor& x, int64_t count) const { return x.unflatten(-1, {count, -1}).transpose(1, 2); }

  Tensor attention(const Tensor& x) {
    const auto repeat = [&](const Tensor& t) { return t.repeat_interleave(shape_.heads / shape_.key_heads, 1); };
    const auto q = heads(query_->forward(x), shape_.heads);
    const auto k = repeat(heads(key_->forward(x), shape_.key_heads)), v = repeat(heads(value_->forward(x), shape_.key_heads));
    // Without a mask, which changes no shape and is in no matrix product.
    const auto scores = torch::matmul(q / std::sqrt(static_cast<double>(q.size(-1))), k.transpose(-2, -1));
    const auto mixed = torch::matmul(torch::softmax(scores, -1), v);
    return output_->forward(mixed.transpose(1, 2).flatten(2));
  }

  LlamaShape shape_;
  Tensor attention_scale_, feed_forward_scale_;
  Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, output_{nullptr}, gate_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(Block);

} // namespace

LlamaImpl::LlamaImpl(const LlamaShape& shape) {
  embedding_ = register_module("embedding", torch::nn::Embedding(shape.vocabulary, shape.width));
  for (int64_t i = 0; i < shape.layers; ++i) blocks->push_back(Block(shape));
  register_module("blocks", blocks);
  scale_ = register_parameter("norm", torch::ones({shape.width}));
  head_ = register_module("head", linear(shape.width, shape.vocabulary));
}

Tensor LlamaImpl::forward(const Tensor& tokens) {
  auto x = embedding_->forward(tokens);
  for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
  return head_->forward(rms_norm(x, scale_));
}

} // namespace tessera::benchmarks
