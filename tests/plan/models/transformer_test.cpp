// The models that configs describe: how many parameters they have, and what they compute.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <tessera/fsdp/meta_init.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/prediction.h>
#include <tessera/tests/plan/models/configs.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::transformer_test {

namespace {

using nlohmann::json;
using torch::Tensor;

/// The model of a config that lies in a file.
PlannedModel read(const json& config, const ModelOptions& options = {}) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "config.json") << config.dump();
  return read_model(folder.path(), options);
}

int64_t count(const json& config) {
  const auto model = on_meta(read(config).build);
  int64_t sum = 0;
  for (const auto& parameter : model->parameters()) sum += parameter.numel();
  return sum;
}

/// A model of tiny sizes whose parameters are drawn, without dropout, and what a plain reading of its paper says of it.
class Small {
 public:
  explicit Small(const json& config) : config_(config), planned_(read(config, {.sequence = 6, .dropout = false})) {
    torch::manual_seed(3);
    module_ = planned_.build();
    const torch::NoGradGuard no_grad;
    for (auto& item : module_->named_parameters()) {
      item.value().normal_(0, 0.4);
      parameters_[item.key()] = item.value();
    }
  }

  Tensor loss(bool recompute = false) {
    const PassSettings settings{.rows = 2, .recompute = recompute};
    return planned_.loss(*module_, planned_.batch(settings, torch::kCPU), settings);
  }
  Tensor pipeline_loss() {
    const PassSettings settings{.rows = 2};
    const auto batch = planned_.batch(settings, torch::kCPU);
    PipelineValue value = batch;
    const auto layers = planned_.layers(*module_, settings);
    for (const auto& layer : layers.layers()) value = layer.function(value, batch);
    return planned_.pipeline_loss.sum(value, batch);
  }
  std::vector<Tensor> gradients(const Tensor& loss) { return torch::autograd::grad({loss}, module_->parameters()); }

  // What a reference is made of.
  Tensor operator[](const std::string& name) const { return parameters_.at(name); }
  bool has(const std::string& name) const { return parameters_.contains(name); }
  Tensor linear(const Tensor& x, const std::string& path) const {
    auto y = torch::matmul(x, (*this)[path + ".weight"].t());
    return has(path + ".bias") ? y + (*this)[path + ".bias"] : y;
  }
  Tensor layer_norm(const Tensor& x, const std::string& path, double epsilon) const {
    const auto centred = x - x.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + epsilon).sqrt() * (*this)[path + ".weight"] + (*this)[path + ".bias"];
  }
  Tensor rms_norm(const Tensor& x, const std::string& path) const {
    return x / (x.square().mean(-1, true) + 1e-5).sqrt() * (*this)[path + ".weight"];
  }
  std::tuple<Tensor, Tensor, Tensor> batch() const {
    return planned_.batch({.rows = 2}, torch::kCPU).to<std::tuple<Tensor, Tensor, Tensor>>();
  }

 private:
  json config_;
  PlannedModel planned_;
  std::shared_ptr<torch::nn::Module> module_;
  std::map<std::string, Tensor> parameters_;
};

/// Attention position by position: query and key [rows, length, heads, size], the latter of fewer heads; `sees(i, j)`.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::function<bool(int64_t, int64_t)>& sees) {
  auto out = torch::zeros_like(query);
  const auto shared = query.size(2) / key.size(2);
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < query.size(1); ++i) {
    std::vector<Tensor> heads;
    for (int64_t h = 0; h < query.size(2); ++h) {
      std::vector<int64_t> seen;
      for (int64_t j = 0; j < key.size(1); ++j) {
        if (sees(i, j)) seen.push_back(j);
      }
      const auto places = torch::tensor(seen);
      const auto keys = key.select(2, h / shared).index_select(1, places),
                 values = value.select(2, h / shared).index_select(1, places);
      const auto scores = (keys * query.select(2, h).select(1, i).unsqueeze(1)).sum(-1) / std::sqrt(query.size(3));
      heads.push_back((torch::softmax(scores, -1).unsqueeze(-1) * values).sum(1));
    }
    rows.push_back(torch::cat(heads, -1));
  }
  return torch::stack(rows, 1);
}

/// Each pair of features half a head apart turned by position · base^(-2i/size).
Tensor rotate(const Tensor& x, double base) {
  const auto size = x.size(3), half = size / 2;
  auto out = torch::empty_like(x);
  for (int64_t place = 0; place < x.size(1); ++place) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(place) * std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(size));
      const auto a = x.select(1, place).select(2, i), b = x.select(1, place).select(2, i + half);
      out.select(1, place).select(2, i).copy_(a * std::cos(angle) - b * std::sin(angle));
      out.select(1, place).select(2, i + half).copy_(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return out;
}

Tensor heads(const Tensor& x, int64_t size) { return x.unflatten(-1, {-1, size}); }
Tensor gelu_tanh(const Tensor& x) { return 0.5 * x * (1 + torch::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3)))); }
Tensor plain_gelu(const Tensor& x) { return 0.5 * x * (1 + torch::erf(x / std::sqrt(2.0))); }
Tensor plain_silu(const Tensor& x) { return x * torch::sigmoid(x); }
Tensor entropy(const Tensor& logits, const Tensor& labels) {
  return -torch::log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).mean();
}

constexpr int64_t kHeadSize = 4; // of all small models

Tensor mixture(const Small& model, const Tensor& x, const std::string& path) {
  const auto rows = x.flatten(0, 1);
  const auto scores = torch::softmax(torch::matmul(rows, model[path + ".router.weight"].t()), -1);
  const auto [best, experts] = scores.topk(2, -1);
  std::vector<Tensor> out;
  for (int64_t t = 0; t < rows.size(0); ++t) {
    auto sum = torch::zeros({rows.size(1)});
    for (int64_t k = 0; k < 2; ++k) {
      const auto e = experts[t][k].item<int64_t>();
      const auto inner =
          plain_silu(torch::mv(model[path + ".experts.gate"][e], rows[t])) * torch::mv(model[path + ".experts.up"][e], rows[t]);
      sum = sum + best[t][k] / best[t].sum() * torch::mv(model[path + ".experts.down"][e], inner);
    }
    out.push_back(sum);
  }
  return torch::stack(out).view_as(x);
}

Tensor llama_loss(const Small& model, int64_t window) {
  const auto [tokens, labels, positions] = model.batch();
  auto x = model["model.embed_tokens.weight"].index_select(0, tokens.flatten()).view({2, 6, -1});
  for (int64_t i = 0; i < 2; ++i) {
    const auto path = "model.layers." + std::to_string(i) + ".";
    const auto y = model.rms_norm(x, path + "input_layernorm");
    const auto part = [&](const char* name) { return heads(model.linear(y, path + "self_attn." + name), kHeadSize); };
    const auto mixed = attend(rotate(part("q_proj"), 500000), rotate(part("k_proj"), 500000), part("v_proj"),
                              [&](int64_t a, int64_t b) { return b <= a && b > a - window; });
    x = x + model.linear(mixed, path + "self_attn.o_proj");
    const auto z = model.rms_norm(x, path + "post_attention_layernorm");
    x = x + (model.has(path + "mlp.up_proj.weight")
                 ? model.linear(plain_silu(model.linear(z, path + "mlp.gate_proj")) * model.linear(z, path + "mlp.up_proj"),
                                path + "mlp.down_proj")
                 : mixture(model, z, path + "block_sparse_moe"));
  }
  const auto head = model.has("lm_head.weight") ? "lm_head" : "model.embed_tokens";
  return entropy(model.linear(model.rms_norm(x, "model.norm"), head), labels);
}

Tensor gpt2_loss(const Small& model) {
  const auto [tokens, labels, positions] = model.batch();
  auto x = model["transformer.wte.weight"].index_select(0, tokens.flatten()).view({2, 6, -1}) +
           model["transformer.wpe.weight"].narrow(0, 0, 6);
  for (int64_t i = 0; i < 2; ++i) {
    const auto path = "transformer.h." + std::to_string(i) + ".";
    const auto packed = model.linear(model.layer_norm(x, path + "ln_1", 1e-5), path + "attn.c_attn");
    const auto part = [&](int64_t n) { return heads(packed.narrow(-1, 16 * n, 16), kHeadSize); };
    x = x + model.linear(attend(part(0), part(1), part(2), [](int64_t a, int64_t b) { return b <= a; }), path + "attn.c_proj");
    x = x +
        model.linear(gelu_tanh(model.linear(model.layer_norm(x, path + "ln_2", 1e-5), path + "mlp.c_fc")), path + "mlp.c_proj");
  }
  return entropy(model.linear(model.layer_norm(x, "transformer.ln_f", 1e-5), "transformer.wte"), labels);
}

Tensor bert_body(const Small& model, const std::string& prefix) {
  const auto [tokens, labels, positions] = model.batch();
  const auto table = [&](const char* name) { return model[prefix + "embeddings." + name + ".weight"]; };
  auto x = table("word_embeddings").index_select(0, tokens.flatten()).view({2, 6, -1}) +
           table("position_embeddings").narrow(0, 0, 6) + table("token_type_embeddings")[0];
  x = model.layer_norm(x, prefix + "embeddings.LayerNorm", 1e-12);
  for (int64_t i = 0; i < 2; ++i) {
    const auto path = prefix + "encoder.layer." + std::to_string(i) + ".";
    const auto part = [&](const char* name) { return heads(model.linear(x, path + "attention.self." + name), kHeadSize); };
    const auto mixed = attend(part("query"), part("key"), part("value"), [](int64_t, int64_t) { return true; });
    x = model.layer_norm(x + model.linear(mixed, path + "attention.output.dense"), path + "attention.output.LayerNorm", 1e-12);
    const auto inner = plain_gelu(model.linear(x, path + "intermediate.dense"));
    x = model.layer_norm(x + model.linear(inner, path + "output.dense"), path + "output.LayerNorm", 1e-12);
  }
  return x;
}

Tensor masked_bert_loss(const Small& model) {
  const auto x = plain_gelu(model.linear(bert_body(model, "bert."), "cls.predictions.transform.dense"));
  const auto y = model.layer_norm(x, "cls.predictions.transform.LayerNorm", 1e-12);
  return entropy(model.linear(y, "bert.embeddings.word_embeddings") + model["cls.predictions.bias"], std::get<1>(model.batch()));
}

Tensor vit_loss(const Small& model) {
  const auto [pictures, labels, positions] = model.batch();
  const auto projection = model["vit.embeddings.patch_embeddings.projection.weight"].flatten(1);
  std::vector<Tensor> patches{model["vit.embeddings.cls_token"][0][0].expand({2, -1})};
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t column = 0; column < 2; ++column) {
      const auto patch = pictures.narrow(2, 4 * row, 4).narrow(3, 4 * column, 4).flatten(1);
      patches.push_back(torch::matmul(patch, projection.t()) + model["vit.embeddings.patch_embeddings.projection.bias"]);
    }
  }
  auto x = torch::stack(patches, 1) + model["vit.embeddings.position_embeddings"];
  for (int64_t i = 0; i < 2; ++i) {
    const auto path = "vit.encoder.layer." + std::to_string(i) + ".";
    const auto y = model.layer_norm(x, path + "layernorm_before", 1e-12);
    const auto part = [&](const char* name) { return heads(model.linear(y, path + "attention.attention." + name), kHeadSize); };
    x = x + model.linear(attend(part("query"), part("key"), part("value"), [](int64_t, int64_t) { return true; }),
                         path + "attention.output.dense");
    const auto z = model.layer_norm(x, path + "layernorm_after", 1e-12);
    x = x + model.linear(plain_gelu(model.linear(z, path + "intermediate.dense")), path + "output.dense");
  }
  return entropy(model.linear(model.layer_norm(x, "vit.layernorm", 1e-12).select(1, 0), "classifier"), labels);
}

void expect_close(const Tensor& a, const Tensor& b) {
  EXPECT_NEAR(a.item<double>(), b.item<double>(), 1e-5 * std::abs(b.item<double>()));
}

} // namespace

TEST(Transformer, HasThePublishedNumbersOfParameters) {
  EXPECT_EQ(count(configs::llama(4096, 14336, 32, 32, 8, 128256)), 8'030'261'248);
  EXPECT_EQ(count(configs::llama(8192, 28672, 80, 64, 8, 128256)), 70'553'706'496);
  EXPECT_EQ(count(configs::mixtral(4096, 14336, 32, 32, 8, 32000)), 46'702'792'704);
  EXPECT_EQ(count(configs::gpt2(768, 12, 12, 50257, 1024)), 124'439'808);
  EXPECT_EQ(count(configs::bert("BertModel", 768, 12, 12, 30522)), 109'482'240);
  EXPECT_EQ(count(configs::bert("BertForMaskedLM", 768, 12, 12, 30522)), 109'514'298);
  EXPECT_EQ(count(configs::vit(768, 12, 12, 224, 16, 1000)), 86'567'656);
  auto qwen = configs::llama(896, 4864, 24, 14, 2, 151936); // Qwen2-0.5B
  qwen.update({{"architectures", {"Qwen2ForCausalLM"}}, {"tie_word_embeddings", true}});
  EXPECT_EQ(count(qwen), 494'032'768);
  auto mistral = configs::llama(4096, 14336, 32, 32, 8, 32000);
  mistral["architectures"] = {"MistralForCausalLM"};
  EXPECT_EQ(count(mistral), 7'241'732'096);
}

TEST(Transformer, ComputesWhatItsArchitectureSays) {
  const auto all = configs::small();
  const auto expect = [&](const std::string& name, const std::function<Tensor(const Small&)>& reference) {
    SCOPED_TRACE(name);
    Small model(all.at(name));
    expect_close(model.loss(), reference(model));
  };
  for (const auto* name : {"llama", "qwen2", "mixtral"}) expect(name, [](const Small& model) { return llama_loss(model, 100); });
  expect("mistral", [](const Small& model) { return llama_loss(model, 3); });
  expect("gpt2", gpt2_loss);
  expect("bert", [](const Small& model) {
    return torch::tanh(model.linear(bert_body(model, "").select(1, 0), "pooler.dense")).square().mean();
  });
  expect("masked bert", masked_bert_loss);
  expect("vit", vit_loss);
}

TEST(Transformer, RecomputesAndRunsAsLayersWithTheSameNumbers) {
  for (const auto& [name, config] : configs::small()) {
    SCOPED_TRACE(name);
    Small model(config);
    const auto loss = model.loss();
    const auto gradients = model.gradients(loss);
    for (const auto& other : {model.loss(/*recompute=*/true), model.pipeline_loss()}) {
      EXPECT_EQ(loss.item<double>(), other.item<double>());
      const auto others = model.gradients(other);
      for (size_t i = 0; i < gradients.size(); ++i) EXPECT_TRUE(torch::allclose(gradients[i], others[i], 1e-5, 1e-7));
    }
  }
}

TEST(Transformer, HasNormsOfPlainOperators) {
  auto config = configs::small().at("llama");
  const auto fused = read(config), plain = read(config, {.fused_norms = false});
  std::vector<double> losses;
  for (const auto& model : {fused, plain}) {
    torch::manual_seed(1);
    const auto module = model.build();
    const PassSettings pass{.rows = 2};
    losses.push_back(model.loss(*module, model.batch(pass, torch::kCPU), pass).item<double>());
  }
  EXPECT_NEAR(losses[0], losses[1], 1e-5 * losses[0]);
  Machine machine{};
  machine.memory = int64_t{1} << 34;
  machine.fp32_flops = 1e12;
  machine.memory_bandwidth = 1e11;
  EXPECT_GT(predict(plain, machine, {}).compute, predict(fused, machine, {}).compute);
}

/// Scores go through the memory, also those that the mask hides.
TEST(Transformer, HasAttentionOfProducts) {
  for (const auto& [name, config] : configs::small()) {
    SCOPED_TRACE(name);
    const ModelOptions options{.sequence = 8, .dropout = false};
    auto by_products = options;
    by_products.fused_attention = false;
    std::vector<Tensor> gradients[2];
    double losses[2];
    for (const bool fused : {false, true}) {
      const auto model = read(config, fused ? options : by_products);
      torch::manual_seed(1);
      const auto module = model.build();
      const PassSettings pass{.rows = 2};
      const auto loss = model.loss(*module, model.batch(pass, torch::kCPU), pass);
      losses[fused] = loss.item<double>();
      loss.backward();
      for (const auto& parameter : module->parameters()) gradients[fused].push_back(parameter.grad());
      EXPECT_TRUE(fused || !model.splits_sequence);
    }
    EXPECT_NEAR(losses[0], losses[1], 1e-5 * losses[1]);
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      if (gradients[1][i].defined()) EXPECT_TRUE(torch::allclose(gradients[0][i], gradients[1][i], 1e-4, 1e-6)) << i;
    }
  }
  Machine machine{};
  machine.memory = int64_t{1} << 34;
  machine.fp32_flops = 1e12;
  machine.memory_bandwidth = 1e11;
  const auto config = configs::small().at("gpt2");
  const auto fused = predict(read(config), machine, {}),
             by_products = predict(read(config, {.fused_attention = false}), machine, {});
  EXPECT_GT(by_products.compute, fused.compute);
  EXPECT_GT(by_products.flops, fused.flops);
}

TEST(Transformer, CountsOperationsByItsFormula) {
  const auto model = read(configs::llama(4096, 14336, 32, 32, 8, 128256), {.sequence = 8192});
  const double weights = 8'030'261'248 - 128256.0 * 4096 - 65 * 4096; // without the table of tokens and the norms
  EXPECT_DOUBLE_EQ(model.flops_a_row, 8192 * (6 * weights + 12.0 * 32 * 4096 * 8192));
  const auto mixture = read(configs::mixtral(4096, 14336, 32, 32, 8, 32000), {.sequence = 1});
  const double active = 46'702'792'704 - 32000.0 * 4096 - 65 * 4096 - 6.0 * 32 * 3 * 4096 * 14336; // two of eight experts
  EXPECT_DOUBLE_EQ(mixture.flops_a_row, 6 * active + 12.0 * 32 * 4096);
  EXPECT_EQ(model.sequence, 8192);
  EXPECT_EQ(mixture.experts, 8);
}

} // namespace tessera::testing::transformer_test
