#pragma once

// Configs as Hugging Face's: of published models, and of small ones of the same kinds.

#include <map>
#include <string>

#include <nlohmann/json.hpp>

namespace tessera::testing::configs {

using nlohmann::json;

inline json llama(int64_t width, int64_t hidden, int64_t layers, int64_t heads, int64_t key_heads, int64_t vocabulary) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", width},
          {"intermediate_size", hidden},
          {"num_hidden_layers", layers},
          {"num_attention_heads", heads},
          {"num_key_value_heads", key_heads},
          {"vocab_size", vocabulary},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 500000.0},
          {"max_position_embeddings", 8192},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"rope_scaling", nullptr},
          {"tie_word_embeddings", false}};
}

inline json mixtral(int64_t width, int64_t hidden, int64_t layers, int64_t heads, int64_t key_heads, int64_t vocabulary) {
  auto config = llama(width, hidden, layers, heads, key_heads, vocabulary);
  config.update({{"architectures", {"MixtralForCausalLM"}},
                 {"num_local_experts", 8},
                 {"num_experts_per_tok", 2},
                 {"sliding_window", nullptr}});
  return config;
}

inline json gpt2(int64_t width, int64_t layers, int64_t heads, int64_t vocabulary, int64_t positions) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"n_embd", width},
          {"n_layer", layers},
          {"n_head", heads},
          {"vocab_size", vocabulary},
          {"n_positions", positions},
          {"activation_function", "gelu_new"},
          {"attn_pdrop", 0.1},
          {"resid_pdrop", 0.1}};
}

inline json bert(const std::string& architecture, int64_t width, int64_t layers, int64_t heads, int64_t vocabulary) {
  return {{"architectures", {architecture}}, {"hidden_size", width},           {"num_hidden_layers", layers},
          {"num_attention_heads", heads},    {"intermediate_size", 4 * width}, {"vocab_size", vocabulary},
          {"max_position_embeddings", 512},  {"type_vocab_size", 2},           {"hidden_act", "gelu"},
          {"layer_norm_eps", 1e-12}};
}

inline json vit(int64_t width, int64_t layers, int64_t heads, int64_t image, int64_t patch, int64_t classes) {
  return {{"architectures", {"ViTForImageClassification"}},
          {"hidden_size", width},
          {"num_hidden_layers", layers},
          {"num_attention_heads", heads},
          {"intermediate_size", 4 * width},
          {"image_size", image},
          {"patch_size", patch},
          {"num_labels", classes},
          {"hidden_act", "gelu"},
          {"layer_norm_eps", 1e-12}};
}

/// One of each kind, which a test computes with.
inline std::map<std::string, json> small() {
  auto qwen = llama(16, 24, 2, 4, 2, 19), mistral = llama(16, 24, 2, 4, 2, 19);
  qwen.update({{"architectures", {"Qwen2ForCausalLM"}}, {"tie_word_embeddings", true}});
  mistral.update({{"architectures", {"MistralForCausalLM"}}, {"sliding_window", 3}});
  return {{"llama", llama(16, 24, 2, 4, 2, 19)},
          {"llama with one key head", llama(16, 24, 2, 4, 1, 19)},
          {"qwen2", qwen},
          {"mistral", mistral},
          {"mixtral", mixtral(16, 24, 2, 4, 2, 19)},
          {"gpt2", gpt2(16, 2, 4, 19, 12)},
          {"bert", bert("BertModel", 16, 2, 4, 19)},
          {"masked bert", bert("BertForMaskedLM", 16, 2, 4, 19)},
          {"vit", vit(16, 2, 4, 8, 4, 5)}};
}

} // namespace tessera::testing::configs
