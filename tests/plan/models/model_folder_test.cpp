// What read_model refuses, and what it takes of a folder's weights.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <tessera/fsdp/meta_init.h>
#include <tessera/plan/model_folder.h>
#include <tessera/plan/models/read_config.h>
#include <tessera/plan/models/weights.h>
#include <tessera/tests/plan/models/configs.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::model_folder_test {

namespace {

using nlohmann::json;
using Shapes = std::map<std::string, std::vector<int64_t>>;

/// The shapes that files of a config's model have.
Shapes shapes_of(const json& config) {
  Shapes shapes;
  const auto read = internal::models::read_transformer(internal::JsonView(config, "config"));
  for (const auto& tensor : internal::models::file_tensors(read)) shapes[tensor.name] = tensor.sizes;
  return shapes;
}

/// A safetensors file of zeros in fp16.
void write_weights(const std::filesystem::path& path, const Shapes& shapes) {
  json header;
  int64_t end = 0;
  for (const auto& [name, sizes] : shapes) {
    const auto begin = end;
    end += 2 * c10::multiply_integers(sizes);
    header[name] = {{"dtype", "F16"}, {"shape", sizes}, {"data_offsets", {begin, end}}};
  }
  const auto text = header.dump();
  const auto length = static_cast<uint64_t>(text.size());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << text << std::string(static_cast<size_t>(end), '\0');
}

class ModelFolder : public ::testing::Test {
 protected:
  PlannedModel read(const json& config, const ModelOptions& options = {}) {
    folder_.write("config.json", config.dump());
    return read_model(folder_.path(), options);
  }
  PlannedModel read(const json& config, const Shapes& shapes) {
    write_weights(folder_.path() / "model.safetensors", shapes);
    return read(config);
  }

  TemporaryFolder folder_;
};

json layers(const json& list) {
  return {{"format", "tessera layers"},
          {"version", 1},
          {"input", {{"tokens", 6}, {"vocabulary", 11}}},
          {"loss", "cross_entropy"},
          {"layers", list}};
}

json blocks(int64_t times) {
  const json attention{{"kind", "residual"},
                       {"layers", {{{"kind", "layer_norm"}, {"width", 8}}, {{"kind", "attention"}, {"width", 8}, {"heads", 2}}}}};
  const json feed_forward{{"kind", "residual"},
                          {"layers",
                           {{{"kind", "layer_norm"}, {"width", 8}},
                            {{"kind", "linear"}, {"in", 8}, {"out", 32}, {"split", "out"}},
                            {{"kind", "gelu"}},
                            {{"kind", "linear"}, {"in", 32}, {"out", 8}, {"split", "in"}}}}};
  return layers({{{"kind", "embedding"}, {"vocabulary", 11}, {"width", 8}},
                 {{"kind", "repeat"}, {"times", times}, {"layers", {attention, feed_forward}}},
                 {{"kind", "layer_norm"}, {"width", 8}},
                 {{"kind", "linear"}, {"in", 8}, {"out", 11}, {"bias", false}}});
}

double loss_of(const PlannedModel& planned, torch::nn::Module& model, bool recompute) {
  const PassSettings settings{.rows = 3, .recompute = recompute};
  const auto loss = planned.loss(model, planned.batch(settings, torch::kCPU), settings);
  loss.backward();
  return loss.item<double>();
}

} // namespace

TEST_F(ModelFolder, TakesTheWeightsOfEachKind) {
  for (const auto& [name, config] : configs::small()) {
    SCOPED_TRACE(name);
    EXPECT_GT(read(config, shapes_of(config)).flops_a_row, 0);
  }
}

TEST_F(ModelFolder, HasTheNamesAndShapesOfPublishedFiles) {
  const auto gpt2 = shapes_of(configs::gpt2(768, 12, 12, 50257, 1024));
  EXPECT_EQ(gpt2.size(), 148u);
  EXPECT_EQ(gpt2.at("transformer.h.11.attn.c_attn.weight"), (std::vector<int64_t>{768, 2304}));
  EXPECT_EQ(gpt2.at("transformer.h.0.mlp.c_proj.weight"), (std::vector<int64_t>{3072, 768}));
  EXPECT_EQ(gpt2.at("transformer.wte.weight"), (std::vector<int64_t>{50257, 768}));
  const auto mixtral = shapes_of(configs::mixtral(4096, 14336, 32, 32, 8, 32000));
  EXPECT_EQ(mixtral.size(), 995u);
  EXPECT_EQ(mixtral.at("model.layers.31.block_sparse_moe.gate.weight"), (std::vector<int64_t>{8, 4096}));
  EXPECT_EQ(mixtral.at("model.layers.0.block_sparse_moe.experts.7.w2.weight"), (std::vector<int64_t>{4096, 14336}));
  EXPECT_EQ(mixtral.at("model.layers.0.block_sparse_moe.experts.7.w3.weight"), (std::vector<int64_t>{14336, 4096}));
  const auto llama = shapes_of(configs::llama(4096, 14336, 32, 32, 8, 128256));
  EXPECT_EQ(llama.size(), 291u);
  EXPECT_EQ(llama.at("model.layers.3.self_attn.k_proj.weight"), (std::vector<int64_t>{1024, 4096}));
  const auto vit = shapes_of(configs::vit(768, 12, 12, 224, 16, 1000));
  EXPECT_EQ(vit.at("vit.embeddings.patch_embeddings.projection.weight"), (std::vector<int64_t>{768, 3, 16, 16}));
  EXPECT_EQ(vit.at("vit.encoder.layer.0.attention.attention.query.bias"), (std::vector<int64_t>{768}));
}

TEST_F(ModelFolder, TakesOtherNamesThatFilesOfTheModelHave) {
  const auto config = configs::small().at("gpt2");
  Shapes bare;
  for (const auto& [name, sizes] : shapes_of(config)) bare[name.substr(std::string("transformer.").size())] = sizes;
  bare["h.0.attn.bias"] = {1, 1, 12, 12};
  bare["lm_head.weight"] = {19, 16};
  EXPECT_NO_THROW(read(config, bare));
  const auto bert = configs::small().at("masked bert");
  Shapes old;
  for (const auto& [as_new, sizes] : shapes_of(bert)) {
    auto name = as_new;
    if (name.ends_with("LayerNorm.weight")) name.replace(name.size() - 6, 6, "gamma");
    if (name.ends_with("LayerNorm.bias")) name.replace(name.size() - 4, 4, "beta");
    old[name] = sizes;
  }
  old["bert.pooler.dense.weight"] = {16, 16};
  old["cls.seq_relationship.bias"] = {2};
  old["bert.embeddings.position_ids"] = {1, 512};
  EXPECT_NO_THROW(read(bert, old));
}

TEST_F(ModelFolder, NamesTensorsThatDoNotFit) {
  const auto config = configs::small().at("llama");
  auto shapes = shapes_of(config);
  shapes["model.norm.weight"] = {17};
  EXPECT_THROWS_WITH(read(config, shapes), "'model.norm.weight' has the shape [17], but the model's has [16]");
  shapes.erase("model.norm.weight");
  EXPECT_THROWS_WITH(read(config, shapes), "'model.norm.weight' [16] is missing");
  shapes = shapes_of(config);
  shapes["model.layers.2.mlp.up_proj.weight"] = {24, 16};
  EXPECT_THROWS_WITH(read(config, shapes), "'model.layers.2.mlp.up_proj.weight', which the model does not have");
  EXPECT_NO_THROW(read(config, ModelOptions{.checks_weights = false}));
  auto gpt2 = shapes_of(configs::small().at("gpt2"));
  std::ranges::reverse(gpt2["transformer.h.1.attn.c_attn.weight"]);
  EXPECT_THROWS_WITH(read(configs::small().at("gpt2"), gpt2), "'transformer.h.1.attn.c_attn.weight' has the shape [48, 16]");
}

TEST_F(ModelFolder, RefusesConfigsThatItDoesNotUnderstand) {
  EXPECT_THROWS_WITH(read_model(folder_.path()), "has no config.json");
  EXPECT_THROWS_WITH(read_model(folder_.path() / "none"), "read_model: there is no");
  auto config = configs::small().at("llama");
  config["architectures"] = {"LlamaForCausalML"};
  EXPECT_THROWS_WITH(read(config),
                     "\"LlamaForCausalML\" is unknown; the nearest known one is \"LlamaForCausalLM\", all are: BertForMaskedLM");
  config["architectures"] = json::array();
  EXPECT_THROWS_WITH(read(config), "names 0 architectures, but must name one");
  const auto refuses = [&](const char* name, const char* key, const json& value, const std::string& message) {
    auto changed = configs::small().at(name);
    changed[key] = value;
    if (value.is_null()) changed.erase(key);
    EXPECT_THROWS_WITH(read(changed), message);
  };
  refuses("llama", "hidden_size", nullptr, "hidden_size");
  refuses("llama", "hidden_size", -16, "is -16, but must be positive");
  refuses("llama", "hidden_size", "16", "hidden_size");
  refuses("llama", "hidden_size", 18, "a width of 18 is no multiple of 4 heads");
  refuses("llama", "num_key_value_heads", 3, "4 heads are no multiple of 3 heads of keys and values");
  refuses("llama", "hidden_act", "sofplus", "\"sofplus\" is an unknown activation; known: gelu");
  refuses("mixtral", "num_experts_per_tok", 9, "is 9, but there are 8 experts");
  refuses("gpt2", "attn_pdrop", 1.5, "is 1.5, but must be in [0, 1)");
  refuses("vit", "patch_size", 3, "an image of 8 is no multiple of patches of 3");
  EXPECT_THROWS_WITH(read(configs::small().at("gpt2"), ModelOptions{.sequence = 13}),
                     "a sequence of 13 positions, but the model has 12");
  folder_.write("config.json", "{\"architectures\": ");
  EXPECT_THROWS_WITH(read_model(folder_.path()), "config.json");
}

TEST_F(ModelFolder, ReadsAConfigOfLayers) {
  const auto planned = read(blocks(3));
  EXPECT_EQ(planned.groups, std::vector<std::string>{"1.*"});
  EXPECT_EQ(planned.sequence, 6);
  torch::manual_seed(1);
  const auto model = planned.build();
  EXPECT_EQ(model->named_parameters().size(), 1u + 3 * (2 + 8 + 2 + 4) + 2 + 1);
  const auto loss = loss_of(planned, *model, false);
  EXPECT_NEAR(loss, std::log(11.0), 1);
  EXPECT_EQ(loss, loss_of(planned, *model, true));
  const PassSettings settings{.rows = 3};
  const auto batch = planned.batch(settings, torch::kCPU);
  PipelineValue value = batch;
  const auto list = planned.layers(*model, settings);
  EXPECT_EQ(list.layers().size(), 6u);
  for (const auto& layer : list.layers()) value = layer.function(value, batch);
  EXPECT_EQ(loss, planned.pipeline_loss.sum(value, batch).item<double>());
  EXPECT_EQ(planned.tensor_parallel(*model, {.ranks = 2}).size(), 7u);
}

TEST_F(ModelFolder, ReadsAConfigOfPictures) {
  auto config = layers({{{"kind", "conv2d"}, {"in", 3}, {"out", 8}, {"kernel", 3}, {"padding", 1}},
                        {{"kind", "batch_norm"}, {"channels", 8}},
                        {{"kind", "relu"}},
                        {{"kind", "max_pool"}, {"size", 2}},
                        {{"kind", "average_pool"}},
                        {{"kind", "flatten"}},
                        {{"kind", "dropout"}, {"p", 0.1}},
                        {{"kind", "linear"}, {"in", 8}, {"out", 5}}});
  config["input"] = {{"features", {3, 9, 9}}};
  const auto planned = read(config);
  const auto model = planned.build();
  EXPECT_NEAR(loss_of(planned, *model, false), std::log(5.0), 1);
  EXPECT_EQ(planned.sequence, 0);
}

TEST_F(ModelFolder, RefusesLayersThatItDoesNotUnderstand) {
  const auto refuses = [&](const json& layer, const std::string& message) {
    EXPECT_THROWS_WITH(read(layers(json::array({layer}))), message);
  };
  refuses({{"kind", "linaer"}, {"in", 1}, {"out", 1}}, "\"linaer\" is unknown; the nearest is \"linear\"");
  refuses({{"kind", "linear"}, {"in", 1}, {"outs", 1}}, "the key \"outs\" is unknown here; the nearest is \"out\"");
  refuses({{"kind", "linear"}, {"in", 1}}, "out");
  refuses({{"kind", "linear"}, {"in", 0}, {"out", 1}}, "is 0, but must be positive");
  refuses({{"kind", "attention"}, {"width", 8}, {"heads", 3}}, "is 3, of which 8 is no multiple");
  refuses({{"kind", "repeat"}, {"times", 2}, {"layers", json::array()}}, "holds no layer");
  auto config = blocks(1);
  config["loss"] = "hinge";
  EXPECT_THROWS_WITH(read(config), "is \"hinge\", but must be \"cross_entropy\" or \"mean_square\"");
  config = blocks(1);
  EXPECT_THROWS_WITH(read(config, ModelOptions{.fused_norms = false}), "a file of layers has fused norms alone");
  EXPECT_THROWS_WITH(read(config, ModelOptions{.fused_attention = false}), "a file of layers has fused attention alone");
  config["version"] = 2;
  EXPECT_THROWS_WITH(read(config), "must be 1");
}

} // namespace tessera::testing::model_folder_test
