#include "embed_minilm/bert.h"

#include <tessera/activations/recompute.h>

#include <nlohmann/json.hpp>

#include "common/files.h"

namespace minilm {
namespace nn = torch::nn;

namespace {

/// A child module that holds others and computes nothing: a part of a parameter's name.
nn::Module& part(nn::Module& parent, const std::string& name) {
  return *parent.register_module(name, std::make_shared<nn::Module>(name));
}

nn::LayerNorm layer_norm(const BertConfig& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& path) : path_(path) {
    const auto text = examples::read_file(path, "the model's configuration");
    json_ = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    TORCH_CHECK(json_.is_object(), path, " is no JSON object");
  }

  int64_t size(const char* field) const {
    const auto found = json_.find(field);
    TORCH_CHECK(
        found != json_.end() && found->is_number_integer() && found->get<int64_t>() > 0 && found->get<int64_t>() < kLargest,
        path_, ": ", field, " is ", found == json_.end() ? "missing" : found->dump(), ", but must be a size below ", kLargest);
    return found->get<int64_t>();
  }
  double number(const char* field, double otherwise) const {
    const auto found = json_.find(field);
    if (found == json_.end()) return otherwise;
    TORCH_CHECK(found->is_number(), path_, ": ", field, " is ", found->dump(), ", but must be a number");
    return found->get<double>();
  }
  void expect(const char* field, const std::string& value) const {
    const auto found = json_.find(field);
    TORCH_CHECK(found == json_.end() || *found == value, path_, ": ", field, " is ", found->dump(), ", but only \"", value,
                "\" is supported");
  }

 private:
  static constexpr int64_t kLargest = 1'000'000'000;

  std::string path_;
  nlohmann::json json_;
};

} // namespace

BertConfig read_config(const std::string& path) {
  const ConfigFile file(path);
  file.expect("model_type", "bert");
  file.expect("hidden_act", "gelu");
  file.expect("position_embedding_type", "absolute");
  BertConfig config;
  config.vocab_size = file.size("vocab_size");
  config.max_position_embeddings = file.size("max_position_embeddings");
  config.type_vocab_size = file.size("type_vocab_size");
  config.hidden_size = file.size("hidden_size");
  config.intermediate_size = file.size("intermediate_size");
  config.num_hidden_layers = file.size("num_hidden_layers");
  config.num_attention_heads = file.size("num_attention_heads");
  config.layer_norm_eps = file.number("layer_norm_eps", config.layer_norm_eps);
  TORCH_CHECK(config.hidden_size % config.num_attention_heads == 0, path, ": hidden_size ", config.hidden_size,
              " is no multiple of num_attention_heads ", config.num_attention_heads);
  return config;
}

EmbeddingsImpl::EmbeddingsImpl(const BertConfig& config) {
  word_embeddings_ = register_module("word_embeddings", nn::Embedding(config.vocab_size, config.hidden_size));
  position_embeddings_ =
      register_module("position_embeddings", nn::Embedding(config.max_position_embeddings, config.hidden_size));
  token_type_embeddings_ = register_module("token_type_embeddings", nn::Embedding(config.type_vocab_size, config.hidden_size));
  norm_ = register_module("LayerNorm", layer_norm(config));
}

torch::Tensor EmbeddingsImpl::forward(const torch::Tensor& tokens) {
  const auto positions = position_embeddings_->forward(torch::arange(tokens.size(1), tokens.options()));
  const auto segment = token_type_embeddings_->forward(torch::zeros({1}, tokens.options()));
  return norm_->forward(word_embeddings_->forward(tokens) + segment + positions);
}

SelfAttentionImpl::SelfAttentionImpl(const BertConfig& config) : heads_(config.num_attention_heads) {
  query_ = register_module("query", lora::Linear(config.hidden_size, config.hidden_size));
  key_ = register_module("key", lora::Linear(config.hidden_size, config.hidden_size));
  value_ = register_module("value", lora::Linear(config.hidden_size, config.hidden_size));
}

torch::Tensor SelfAttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& mask) {
  const auto batch = x.size(0), time = x.size(1), width = x.size(2);
  const auto split = [&](const torch::Tensor& features) {
    return features.view({batch, time, heads_, width / heads_}).transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(split(query_->forward(x)), split(key_->forward(x)),
                                                      split(value_->forward(x)), mask.view({batch, 1, 1, time}));
  return mixed.transpose(1, 2).reshape({batch, time, width});
}

ResidualImpl::ResidualImpl(int64_t inputs, const BertConfig& config) {
  dense_ = register_module("dense", lora::Linear(inputs, config.hidden_size));
  norm_ = register_module("LayerNorm", layer_norm(config));
}

torch::Tensor ResidualImpl::forward(const torch::Tensor& x, const torch::Tensor& residual) {
  return norm_->forward(residual + dense_->forward(x));
}

LayerImpl::LayerImpl(const BertConfig& config) {
  auto& attention = part(*this, "attention");
  self_ = attention.register_module("self", SelfAttention(config));
  attention_output_ = attention.register_module("output", Residual(config.hidden_size, config));
  dense_ = part(*this, "intermediate").register_module("dense", lora::Linear(config.hidden_size, config.intermediate_size));
  output_ = register_module("output", Residual(config.intermediate_size, config));
}

torch::Tensor LayerImpl::forward(const torch::Tensor& x, const torch::Tensor& mask) {
  const auto attended = attention_output_->forward(self_->forward(x, mask), x);
  return output_->forward(torch::gelu(dense_->forward(attended)), attended);
}

BertImpl::BertImpl(const BertConfig& config) : config_(config) {
  embeddings_ = register_module("embeddings", Embeddings(config));
  layers_ = part(*this, "encoder").register_module("layer", nn::ModuleList());
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) layers_->push_back(Layer(config));
}

torch::Tensor BertImpl::forward(const torch::Tensor& tokens, const torch::Tensor& mask) {
  TORCH_CHECK(tokens.size(1) <= config_.max_position_embeddings, "a sentence of ", tokens.size(1),
              " word pieces, but the model has positions for ", config_.max_position_embeddings);
  auto x = embeddings_->forward(tokens);
  for (const auto& module : *layers_) {
    auto& layer = *module->as<Layer>();
    x = recompute_ ? tessera::recompute(layer, x, mask) : layer.forward(x, mask);
  }
  return x;
}

} // namespace minilm
