#pragma once

// A small GPT as layers of a pipeline.

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include <tessera/activations/recompute.h>
#include <tessera/parallel/pipeline_layers.h>

#include <tessera/tests/parallel/small_gpt.h>

namespace tessera::testing {

struct PipelineGptOptions {
  int64_t depth = 4;
  bool ties = true;
  bool recomputes = false;
};

/// Layers: embed, blocks.0, …, head.
struct PipelineGptImpl : torch::nn::Module {
  static constexpr int64_t kVocabulary = 29, kWidth = 24, kTime = 8;

  explicit PipelineGptImpl(const PipelineGptOptions& gpt = {})
      : options(gpt),
        tokens(register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth))),
        places(register_module("places", torch::nn::Embedding(kTime, kWidth))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))) {
    for (int64_t i = 0; i < gpt.depth; ++i) blocks->push_back(GptBlock(kWidth, /*heads=*/4, /*key_heads=*/2));
    if (!gpt.ties) {
      head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
    }
  }

  torch::Tensor embed(const torch::Tensor& text) { return tokens(text) + places(torch::arange(text.size(1), text.options())); }
  torch::Tensor logits(const torch::Tensor& x) { return options.ties ? torch::linear(norm(x), tokens->weight) : head(norm(x)); }
  torch::Tensor block(GptBlockImpl& block, const torch::Tensor& x) const {
    return options.recomputes ? tessera::recompute(block, x) : block.forward(x);
  }
  torch::Tensor forward(const torch::Tensor& text) {
    auto x = embed(text);
    for (auto& each : *blocks) x = block(*each->as<GptBlock>(), x);
    return logits(x);
  }

  PipelineGptOptions options;
  torch::nn::Embedding tokens, places;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(PipelineGpt);

/// A micro-batch: tokens and targets, [rows, time].
using TextBatch = std::tuple<torch::Tensor, torch::Tensor>;

inline PipelineLayers layers_of(PipelineGpt& model, bool declares_tie = true) {
  PipelineLayers layers(*model);
  auto* const gpt = model.get();
  layers.add("embed", {"tokens", "places"}, [gpt](const TextBatch& batch) { return gpt->embed(std::get<0>(batch)); });
  layers.add_list("blocks", [gpt](GptBlockImpl& block, const torch::Tensor& x) { return gpt->block(block, x); });
  if (gpt->options.ties) {
    layers.add("head", {"norm", "tokens.weight"}, [gpt](const torch::Tensor& x) { return gpt->logits(x); });
    if (declares_tie) layers.tie("tokens.weight");
  } else {
    layers.add("head", {"norm", "head"}, [gpt](const torch::Tensor& x) { return gpt->logits(x); });
  }
  return layers;
}

inline PipelineGpt seeded_pipeline_gpt(const PipelineGptOptions& options = {}, torch::Dtype dtype = torch::kFloat) {
  torch::manual_seed(3);
  PipelineGpt model(options);
  model->to(dtype);
  const torch::NoGradGuard no_grad;
  model->tokens->weight.mul_(0.3);
  return model;
}

} // namespace tessera::testing
