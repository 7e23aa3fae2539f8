#include <tessera/plan/models/read_config.h>

#include <absl/strings/str_join.h>

#include <map>

#include <tessera/plan/models/fields.h>

namespace tessera::internal::models {

namespace {

using Config = TransformerConfig;

Activation activation_of(const JsonView& json, const std::string& key, const std::string& otherwise) {
  static const std::map<std::string, Activation> kKnown{{"silu", Activation::kSilu},
                                                        {"swish", Activation::kSilu},
                                                        {"gelu", Activation::kGelu},
                                                        {"gelu_new", Activation::kGeluTanh},
                                                        {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                                        {"relu", Activation::kRelu}};
  const auto name = is_given(json, key) ? json[key].string() : otherwise;
  const auto found = kKnown.find(name);
  if (found == kKnown.end()) json[key].fail("\"" + name + "\" is an unknown activation; known: gelu, gelu_new, relu, silu");
  return found->second;
}

/// The names of Llama and those that follow it.
void name_as_llama(Config& config) {
  config.prefix = "model.";
  config.names = {.blocks = "model.layers", .tokens = "model.embed_tokens", .norm = "model.norm", .head = "lm_head"};
  config.block_names = {.query = "self_attn.q_proj",
                        .key = "self_attn.k_proj",
                        .value = "self_attn.v_proj",
                        .output = "self_attn.o_proj",
                        .attention_norm = "input_layernorm",
                        .feed_forward_norm = "post_attention_layernorm",
                        .gate = "mlp.gate_proj",
                        .up = "mlp.up_proj",
                        .down = "mlp.down_proj",
                        .mixture = "block_sparse_moe"};
}

/// A decoder with RMS norms, rotated positions, grouped queries and a gated feed-forward part.
Config llama(const JsonView& json) {
  Config config;
  name_as_llama(config);
  auto& block = config.block;
  config.layers = positive(json, "num_hidden_layers");
  config.vocabulary = positive(json, "vocab_size");
  config.most_positions = positive_or(json, "max_position_embeddings", 2048);
  config.rotary_base = number_or(json, "rope_theta", 10000);
  if (!(config.rotary_base > 0)) json["rope_theta"].fail("must be positive");
  block.width = positive(json, "hidden_size");
  block.hidden = positive(json, "intermediate_size");
  block.heads = positive(json, "num_attention_heads");
  block.key_heads = positive_or(json, "num_key_value_heads", block.heads);
  block.head_size = positive_or(json, "head_dim", block.width / block.heads);
  block.is_causal = block.is_gated = true;
  block.norm = NormKind::kRms;
  block.norm_epsilon = number_or(json, "rms_norm_eps", 1e-6);
  block.activation = activation_of(json, "hidden_act", "silu");
  block.query_bias = block.output_bias = flag_or(json, "attention_bias", false);
  block.feed_forward_bias = flag_or(json, "mlp_bias", false);
  block.attention_dropout = chance_or(json, "attention_dropout", 0);
  config.head = Head::kLanguage;
  config.is_tied = flag_or(json, "tie_word_embeddings", false);
  return config;
}

Config mistral(const JsonView& json) {
  auto config = llama(json);
  config.block.window = positive_or(json, "sliding_window", 0);
  return config;
}

Config qwen2(const JsonView& json) {
  auto config = llama(json);
  config.block.query_bias = true;
  config.block.output_bias = false;
  if (flag_or(json, "use_sliding_window", false)) config.block.window = positive(json, "sliding_window");
  return config;
}

Config mixtral(const JsonView& json) {
  auto config = mistral(json);
  config.block.experts = positive(json, "num_local_experts");
  config.block.top_k = positive(json, "num_experts_per_tok");
  if (config.block.top_k > config.block.experts)
    json["num_experts_per_tok"].fail(c10::str("is ", config.block.top_k, ", but there are ", config.block.experts, " experts"));
  return config;
}

void name_as_gpt2(Config& config) {
  config.prefix = "transformer.";
  config.names = {.blocks = "transformer.h",
                  .tokens = "transformer.wte",
                  .positions = "transformer.wpe",
                  .norm = "transformer.ln_f",
                  .head = "lm_head"};
  config.block_names = {.packed = "attn.c_attn",
                        .output = "attn.c_proj",
                        .attention_norm = "ln_1",
                        .feed_forward_norm = "ln_2",
                        .up = "mlp.c_fc",
                        .down = "mlp.c_proj"};
}

Config gpt2(const JsonView& json) {
  Config config;
  name_as_gpt2(config);
  auto& block = config.block;
  config.layers = positive(json, "n_layer");
  config.vocabulary = positive(json, "vocab_size");
  config.positions = config.most_positions = positive(json, "n_positions");
  block.width = positive(json, "n_embd");
  block.hidden = positive_or(json, "n_inner", 4 * block.width);
  block.heads = block.key_heads = positive(json, "n_head");
  block.head_size = block.width / block.heads;
  block.is_causal = true;
  block.norm_epsilon = number_or(json, "layer_norm_epsilon", 1e-5);
  block.activation = activation_of(json, "activation_function", "gelu_new");
  block.attention_dropout = chance_or(json, "attn_pdrop", 0.1);
  block.dropout = chance_or(json, "resid_pdrop", 0.1);
  config.head = Head::kLanguage;
  config.is_tied = flag_or(json, "tie_word_embeddings", true);
  config.packs_transposed = true;
  return config;
}

/// What BERT and ViT have in common: their keys and the names of a feed-forward part.
void read_encoder(const JsonView& json, Config& config) {
  auto& block = config.block;
  config.layers = positive(json, "num_hidden_layers");
  block.width = positive(json, "hidden_size");
  block.hidden = positive(json, "intermediate_size");
  block.heads = block.key_heads = positive(json, "num_attention_heads");
  block.head_size = block.width / block.heads;
  block.norm_epsilon = number_or(json, "layer_norm_eps", 1e-12);
  block.activation = activation_of(json, "hidden_act", "gelu");
}

Config bert(const JsonView& json, const std::string& prefix) {
  Config config;
  config.prefix = prefix.empty() ? "bert." : prefix;
  config.names = {.blocks = prefix + "encoder.layer",
                  .tokens = prefix + "embeddings.word_embeddings",
                  .positions = prefix + "embeddings.position_embeddings",
                  .kinds = prefix + "embeddings.token_type_embeddings",
                  .embedding_norm = prefix + "embeddings.LayerNorm",
                  .head_dense = "pooler.dense"};
  config.block_names = {.query = "attention.self.query",
                        .key = "attention.self.key",
                        .value = "attention.self.value",
                        .output = "attention.output.dense",
                        .attention_norm = "attention.output.LayerNorm",
                        .feed_forward_norm = "output.LayerNorm",
                        .up = "intermediate.dense",
                        .down = "output.dense"};
  read_encoder(json, config);
  config.vocabulary = positive(json, "vocab_size");
  config.positions = config.most_positions = positive(json, "max_position_embeddings");
  config.kinds = positive(json, "type_vocab_size");
  config.block.norm_first = config.has_norm = false;
  config.has_embedding_norm = true;
  config.block.attention_dropout = chance_or(json, "attention_probs_dropout_prob", 0.1);
  config.block.dropout = chance_or(json, "hidden_dropout_prob", 0.1);
  config.head = Head::kPooled;
  return config;
}

Config bert_model(const JsonView& json) { return bert(json, ""); }

Config masked_bert(const JsonView& json) {
  auto config = bert(json, "bert.");
  config.head = Head::kMasked;
  config.is_tied = true;
  config.names.head_dense = "cls.predictions.transform.dense";
  config.names.head_norm = "cls.predictions.transform.LayerNorm";
  config.names.head_bias = "cls.predictions.bias";
  return config;
}

Config vit(const JsonView& json) {
  Config config;
  config.prefix = "vit.";
  config.names = {.blocks = "vit.encoder.layer",
                  .positions = "vit.embeddings.position_embeddings",
                  .patches = "vit.embeddings.patch_embeddings.projection",
                  .first = "vit.embeddings.cls_token",
                  .norm = "vit.layernorm",
                  .head = "classifier"};
  config.block_names = {.query = "attention.attention.query",
                        .key = "attention.attention.key",
                        .value = "attention.attention.value",
                        .output = "attention.output.dense",
                        .attention_norm = "layernorm_before",
                        .feed_forward_norm = "layernorm_after",
                        .up = "intermediate.dense",
                        .down = "output.dense"};
  read_encoder(json, config);
  config.image = positive(json, "image_size");
  config.patch = positive(json, "patch_size");
  config.channels = positive_or(json, "num_channels", 3);
  config.block.query_bias = flag_or(json, "qkv_bias", true);
  config.block.attention_dropout = chance_or(json, "attention_probs_dropout_prob", 0);
  config.block.dropout = chance_or(json, "hidden_dropout_prob", 0);
  config.head = Head::kClassifier;
  config.classes =
      is_given(json, "id2label") ? static_cast<int64_t>(json["id2label"].fields().size()) : positive_or(json, "num_labels", 1000);
  return config;
}

using Read = Config (*)(const JsonView&);
const std::map<std::string, Read>& readers() {
  static const std::map<std::string, Read> kReaders{{"BertForMaskedLM", masked_bert}, {"BertModel", bert_model},
                                                    {"GPT2LMHeadModel", gpt2},        {"LlamaForCausalLM", llama},
                                                    {"MistralForCausalLM", mistral},  {"MixtralForCausalLM", mixtral},
                                                    {"Qwen2ForCausalLM", qwen2},      {"ViTForImageClassification", vit}};
  return kReaders;
}

std::string architecture_of(const JsonView& json) {
  const auto listed = json["architectures"].strings();
  if (listed.size() != 1) json["architectures"].fail(c10::str("names ", listed.size(), " architectures, but must name one"));
  if (!readers().contains(listed[0]))
    json["architectures"].fail("\"" + listed[0] + "\" is unknown; the nearest known one is \"" +
                               nearest_of(listed[0], transformer_architectures()) +
                               "\", all are: " + absl::StrJoin(transformer_architectures(), ", "));
  return listed[0];
}

} // namespace

std::vector<std::string> transformer_architectures() {
  std::vector<std::string> names;
  for (const auto& [name, read] : readers()) names.push_back(name);
  return names;
}

TransformerConfig read_transformer(const JsonView& config) {
  const auto architecture = architecture_of(config);
  auto result = readers().at(architecture)(config);
  result.architecture = architecture;
  check(result, config.where());
  return result;
}

void check(const TransformerConfig& config, const std::string& source) {
  const auto& block = config.block;
  TORCH_CHECK_VALUE(block.heads > 0 && block.width % block.heads == 0, source, ": a width of ", block.width,
                    " is no multiple of ", block.heads, " heads");
  TORCH_CHECK_VALUE(block.heads % block.key_heads == 0, source, ": ", block.heads, " heads are no multiple of ", block.key_heads,
                    " heads of keys and values");
  TORCH_CHECK_VALUE(config.rotary_base == 0 || block.head_size % 2 == 0, source, ": heads of ", block.head_size,
                    " features have no halves to rotate");
  TORCH_CHECK_VALUE(!config.takes_pictures() || config.image % config.patch == 0, source, ": an image of ", config.image,
                    " is no multiple of patches of ", config.patch);
}

} // namespace tessera::internal::models
