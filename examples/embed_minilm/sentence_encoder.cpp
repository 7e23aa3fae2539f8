#include "embed_minilm/sentence_encoder.h"

#include <absl/strings/match.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/meta_init.h>

#include <algorithm>
#include <filesystem>

#include "common/ranks.h"
#include "common/sharding.h"

namespace minilm {
namespace {

constexpr int64_t kLongest = 256; // word pieces, as the model was trained; longer sentences are cut off
constexpr const char* kConfig = "config.json";
constexpr const char* kVocabulary = "vocab.txt";
constexpr const char* kWeights = "model.safetensors";

std::string file_in(const std::string& folder, const char* name) { return (std::filesystem::path(folder) / name).string(); }

const std::string& check_folder(const std::string& folder) {
  for (const char* name : {kConfig, kVocabulary, kWeights}) {
    TORCH_CHECK(std::filesystem::exists(file_in(folder, name)), "the model's folder ", folder, " has no ", name,
                "; `scripts/setup --minilm` puts all-MiniLM-L6-v2 into .data/minilm");
  }
  return folder;
}

Bert build(const std::string& config) {
  return tessera::on_meta([&] { return Bert(read_config(config)); });
}

} // namespace

SentenceEncoder::SentenceEncoder(const Options& options)
    : options_((check_world(options, examples::world_size()), options)),
      tokenizer_(file_in(check_folder(options.model), kVocabulary)),
      model_(build(file_in(options.model, kConfig))),
      mesh_(examples::make_mesh(options)),
      rows_(mesh_.defined() ? mesh_.flatten("rows") : tessera::DeviceMesh()),
      device_(mesh_.defined() ? mesh_.device() : torch::Device(torch::kCPU)),
      longest_(static_cast<size_t>(std::min(kLongest, model_->config().max_position_embeddings))) {
  TORCH_CHECK(tokenizer_.size() == model_->config().vocab_size, options.model, ": ", kVocabulary, " has ", tokenizer_.size(),
              " word pieces, but by ", kConfig, " the model knows ", model_->config().vocab_size);
  if (mesh_.defined()) {
    for (const auto& layer : *model_->layers()) examples::shard_module(*layer, mesh_, options);
    examples::shard_module(*model_, mesh_, options);
  }
  tessera::materialize(*model_, [](torch::nn::Module&) {}); // the values come from the file
  load();
}

void SentenceEncoder::load() {
  const auto weights = file_in(options_.model, kWeights);
  const auto report = tessera::checkpoint::load(tessera::state_dict(*model_), weights, {.allow_unused = true, .cast = true});
  for (const auto& name : report.unused) {
    // What sentence embeddings do without. Anything else in the file means that it holds another model.
    TORCH_CHECK(absl::StartsWith(name, "pooler.") || name == "embeddings.position_ids", weights, " holds \"", name,
                "\", which the model of ", kConfig, " does not have");
  }
}

torch::Tensor SentenceEncoder::forward(const std::vector<std::vector<int64_t>>& sentences) {
  size_t longest = 1;
  for (const auto& ids : sentences) longest = std::max(longest, ids.size());
  const std::vector<int64_t> shape{static_cast<int64_t>(sentences.size()), static_cast<int64_t>(longest)};
  auto tokens = torch::full(shape, tokenizer_.padding(), torch::kLong);
  auto mask = torch::zeros(shape, torch::kBool);
  for (int64_t row = 0; row < shape[0]; ++row) {
    const auto& ids = sentences[static_cast<size_t>(row)];
    const auto length = static_cast<int64_t>(ids.size());
    tokens[row].narrow(0, 0, length).copy_(torch::tensor(ids, torch::kLong));
    mask[row].narrow(0, 0, length).fill_(true);
  }
  mask = mask.to(device_);
  const auto features = model_->forward(tokens.to(device_), mask).to(torch::kFloat);
  const auto weights = mask.unsqueeze(-1).to(torch::kFloat);
  const auto mean = (features * weights).sum(1) / weights.sum(1);
  return torch::nn::functional::normalize(mean, torch::nn::functional::NormalizeFuncOptions().dim(1));
}

torch::Tensor SentenceEncoder::embed(const std::vector<std::vector<int64_t>>& sentences, int64_t batch) {
  const torch::NoGradGuard no_grad;
  const auto rows = static_cast<int64_t>(sentences.size());
  const auto [lo, hi] = share(rows);
  const auto largest_share = (rows + examples::world_size() - 1) / examples::world_size();
  std::vector<torch::Tensor> parts;
  // A rank with fewer sentences than others runs as many forwards: they gather the parameters from all ranks.
  for (int64_t done = 0; done < largest_share; done += batch) {
    const auto begin = sentences.begin() + std::min(lo + done, hi), end = sentences.begin() + std::min(lo + done + batch, hi);
    parts.push_back(forward({begin, end}));
  }
  return over_ranks(torch::cat(parts), rows);
}

// As DTensor's Shard(0) cuts them.
RowRange SentenceEncoder::share(int64_t rows) const {
  const int64_t ranks = examples::world_size(), most = (rows + ranks - 1) / ranks;
  const auto lo = std::min(most * examples::rank(), rows);
  return {lo, std::min(lo + most, rows)};
}

torch::Tensor SentenceEncoder::over_ranks(const torch::Tensor& local, int64_t rows) const {
  if (!rows_.defined()) return local;
  return tessera::from_local(local, rows_, {tessera::Shard{0}}, std::vector<int64_t>{rows, local.size(1)});
}

void SentenceEncoder::save(const std::string& folder) const {
  tessera::checkpoint::save_hugging_face(tessera::state_dict(*model_), folder);
  if (examples::rank() != 0) return;
  for (const char* name : {kConfig, kVocabulary})
    std::filesystem::copy_file(file_in(options_.model, name), file_in(folder, name));
}

} // namespace minilm
