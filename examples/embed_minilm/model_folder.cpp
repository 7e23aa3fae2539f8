#include "embed_minilm/model_folder.h"

#include <absl/strings/match.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/read_state_dict.h>

#include <filesystem>
#include <vector>

namespace minilm {
namespace fs = std::filesystem;

namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kVocabulary = "vocab.txt";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kRest[] = {"pooler.", "embeddings.position_ids"}; // with these their names begin

bool is_of_rest(const std::string& name) {
  for (const char* prefix : kRest) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return false;
}

bool holds_weights(const fs::path& file) {
  for (const char* ending : {".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".onnx", ".h5", ".pt"}) {
    if (absl::EndsWith(file.string(), ending)) return true;
  }
  return false;
}

} // namespace

ModelFolder::ModelFolder(std::string folder) : folder_(std::move(folder)) {
  for (const char* name : {kConfig, kVocabulary, kWeights}) {
    TORCH_CHECK(fs::exists(file(name)), "the model's folder ", folder_, " has no ", name,
                "; `scripts/setup --minilm` puts all-MiniLM-L6-v2 into .data/minilm");
  }
}

std::string ModelFolder::file(const char* name) const { return (fs::path(folder_) / name).string(); }

BertConfig ModelFolder::config() const { return read_config(file(kConfig)); }

Tokenizer ModelFolder::tokenizer(const BertConfig& config) const {
  Tokenizer tokenizer(file(kVocabulary));
  TORCH_CHECK(tokenizer.size() == config.vocab_size, folder_, ": ", kVocabulary, " has ", tokenizer.size(),
              " word pieces, but by ", kConfig, " the model knows ", config.vocab_size);
  return tokenizer;
}

void ModelFolder::load(const torch::nn::Module& model, const std::function<bool(const std::string&)>& filter) const {
  const auto weights = file(kWeights);
  const auto report =
      tessera::checkpoint::load(tessera::state_dict(model), weights, {.allow_unused = true, .cast = true, .filter = filter});
  for (const auto& name : report.unused) {
    TORCH_CHECK(is_of_rest(name), weights, " holds \"", name, "\", which the model of ", kConfig, " does not have");
  }
}

tessera::StateDict ModelFolder::rest() const {
  tessera::StateDict rest;
  for (const char* prefix : kRest) rest.merge(tessera::checkpoint::read_state_dict(file(kWeights), {.prefix = prefix}));
  return rest;
}

void ModelFolder::copy_config(const std::string& folder) const {
  for (const char* name : {kConfig, kVocabulary}) fs::copy_file(file(name), fs::path(folder) / name);
}

void ModelFolder::copy_all_but_weights(const std::string& folder) const {
  std::vector<fs::path> files; // all of them before the first copy: `folder` may lie in this one
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    if (entry.is_regular_file() && !holds_weights(entry.path())) files.push_back(entry.path());
  }
  for (const auto& source : files) {
    const auto target = fs::path(folder) / fs::relative(source, folder_);
    fs::create_directories(target.parent_path());
    fs::copy_file(source, target);
  }
}

} // namespace minilm
