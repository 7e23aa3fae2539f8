#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/plan/planned_model.h>

namespace tessera::testing::planned {

using torch::Tensor;

inline Tensor through(torch::nn::Module& block, const Tensor& x, const PassSettings& pass,
                      const std::function<Tensor(torch::nn::Module&, const Tensor&)>& forward) {
  if (!pass.recompute) return forward(block, x);
  return recompute(
      pass.recompute_options(), [&block, forward](const Tensor& input) { return forward(block, input); }, x);
}

/// A block of a transformer: causal attention and an MLP, each after a norm.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, int64_t head_count)
      : heads(head_count),
        attention_norm(register_module("attention_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        mlp_norm(register_module("mlp_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        q_proj(register_module("q_proj", torch::nn::Linear(width, width))),
        k_proj(register_module("k_proj", torch::nn::Linear(width, width))),
        v_proj(register_module("v_proj", torch::nn::Linear(width, width))),
        out_proj(register_module("out_proj", torch::nn::Linear(width, width))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  Tensor forward(const Tensor& x) {
    const auto split = [&](const Tensor& t) { return t.unflatten(-1, {heads, -1}).transpose(1, 2); };
    const auto y = attention_norm(x);
    const auto q = split(q_proj(y)), k = split(k_proj(y)), v = split(v_proj(y));
    const auto mixed = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    const auto z = x + out_proj(mixed.transpose(1, 2).flatten(2));
    return z + down(torch::gelu(up(mlp_norm(z))));
  }
  int64_t heads;
  torch::nn::LayerNorm attention_norm, mlp_norm;
  torch::nn::Linear q_proj, k_proj, v_proj, out_proj, up, down;
};
TORCH_MODULE(Block);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl(int64_t vocabulary, int64_t width, int64_t depth, bool is_tied)
      : embed(register_module("embed", torch::nn::Embedding(vocabulary, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width, /*heads=*/4));
    if (!is_tied)
      lm_head = register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(width, vocabulary).bias(false)));
  }
  Tensor forward(const Tensor& tokens, const PassSettings& pass) {
    auto x = embed(tokens);
    for (const auto& block : *blocks)
      x = through(*block, x, pass, [](auto& module, const Tensor& y) { return module.template as<BlockImpl>()->forward(y); });
    x = norm(x);
    return lm_head ? lm_head(x) : torch::matmul(x, embed->weight.t());
  }
  torch::nn::Embedding embed;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear lm_head{nullptr};
};
TORCH_MODULE(Transformer);

inline PlannedModel transformer(const std::string& name, int64_t vocabulary, int64_t width, int64_t depth, bool is_tied,
                                int64_t length = 16) {
  PlannedModel model{.name = name};
  model.build = [=] { return Transformer(vocabulary, width, depth, is_tied).ptr(); };
  model.groups = {"blocks.*"};
  model.batch = [=](const PassSettings& pass, at::Device device) {
    return PipelineValue(torch::zeros({pass.rows, length}, torch::TensorOptions(torch::kLong).device(device)));
  };
  const auto loss_of = [](const Tensor& logits, const Tensor& tokens) {
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.flatten());
  };
  model.loss = [=](torch::nn::Module& module, const PipelineValue& batch, const PassSettings& pass) {
    const Tensor& tokens = batch.toTensor();
    return loss_of(module.as<TransformerImpl>()->forward(tokens, pass), tokens);
  };
  model.tensor_parallel = [](torch::nn::Module& module, const PlanOptions& options) { return plan_for(module, options); };
  model.layers = [](torch::nn::Module& module, const PassSettings& pass) {
    auto* const net = module.as<TransformerImpl>();
    PipelineLayers layers(module);
    layers.add("embed", {"embed"}, [net](Tensor tokens) { return net->embed(tokens); });
    layers.add_list("blocks", [pass](BlockImpl& block, Tensor x) {
      return through(block, x, pass, [](auto& inner, const Tensor& y) { return inner.template as<BlockImpl>()->forward(y); });
    });
    layers.add("head", {"norm", "lm_head"}, [net](Tensor x) { return net->lm_head(net->norm(x)); });
    return layers;
  };
  model.pipeline_loss.sum = [loss_of](const PipelineValue& logits, const PipelineValue& batch) {
    return loss_of(logits.toTensor(), batch.toTensor());
  };
  if (!is_tied) model.not_in_float8 = {"lm_head"};
  model.sequence = length;
  if (is_tied) model.layers = nullptr;
  return model;
}

/// Layers one after another, each of which is a group.
inline PlannedModel sequence(const std::string& name, const std::function<torch::nn::Sequential()>& make,
                             const std::vector<int64_t>& row, const std::string& groups = "*") {
  PlannedModel model{.name = name};
  model.build = [=] { return make().ptr(); };
  model.groups = {groups};
  model.batch = [=](const PassSettings& pass, at::Device device) {
    auto sizes = row;
    sizes.insert(sizes.begin(), pass.rows);
    return PipelineValue(torch::zeros(sizes, torch::TensorOptions().device(device)));
  };
  model.loss = [](torch::nn::Module& module, const PipelineValue& batch, const PassSettings& pass) {
    auto x = batch.toTensor();
    for (auto& each : *module.as<torch::nn::SequentialImpl>()) {
      auto run = [each](const Tensor& y) mutable { return each.template forward<Tensor>(y); };
      x = pass.recompute ? recompute(pass.recompute_options(), run, x) : run(x);
    }
    return x.square().mean();
  };
  return model;
}

inline torch::nn::Sequential perceptron(const std::vector<int64_t>& widths) {
  torch::nn::Sequential layers;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    layers->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
    layers->push_back(torch::nn::ReLU());
  }
  return layers;
}

inline torch::nn::Sequential convolutions() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(i == 0 ? 3 : 64, 64, 3).padding(1)));
    layers->push_back(torch::nn::BatchNorm2d(64));
    layers->push_back(torch::nn::ReLU());
  }
  layers->push_back(torch::nn::Flatten());
  layers->push_back(torch::nn::Linear(64 * 16, 512));
  return layers;
}

/// Six kinds: transformers with tied and with large separate tables, perceptrons of equal, shrinking and growing layers, and
/// convolutions with batch norms.
inline std::vector<PlannedModel> models() {
  return {transformer("tied transformer", 211, 128, 4, /*is_tied=*/true),
          transformer("transformer", 1003, 128, 3, /*is_tied=*/false),
          sequence("perceptron",
                   [] {
                     return perceptron({256, 256, 256, 256, 256, 256});
                   },
                   {256}),
          sequence("shrinking perceptron",
                   [] {
                     return perceptron({768, 512, 384, 256, 128, 64});
                   },
                   {768}),
          sequence("growing perceptron",
                   [] {
                     return perceptron({64, 128, 256, 384, 512, 768});
                   },
                   {64}),
          sequence("convolutions", convolutions, {3, 4, 4})};
}

} // namespace tessera::testing::planned
