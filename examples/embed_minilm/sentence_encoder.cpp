#include "embed_minilm/sentence_encoder.h"

#include <tessera/checkpoint/hugging_face.h>
#include <tessera/dtensor/api.h>
#include <tessera/fsdp/meta_init.h>

#include <algorithm>

#include "common/ranks.h"
#include "common/sharding.h"
#include "embed_minilm/sentence_batch.h"

namespace minilm {
namespace {

Bert build(const BertConfig& config) {
  return tessera::on_meta([&] { return Bert(config); });
}

} // namespace

SentenceEncoder::SentenceEncoder(const Options& options)
    : options_((check_world(options, examples::world_size()), options)),
      folder_(options.model),
      model_(build(folder_.config())),
      tokenizer_(folder_.tokenizer(model_->config())),
      mesh_(examples::make_mesh(options)),
      rows_(mesh_.defined() ? mesh_.flatten("rows") : tessera::DeviceMesh()),
      device_(mesh_.defined() ? mesh_.device() : torch::Device(torch::kCPU)),
      longest_(static_cast<size_t>(std::min(kLongest, model_->config().max_position_embeddings))) {
  if (mesh_.defined()) {
    for (const auto& layer : *model_->layers()) examples::shard_module(*layer, mesh_, options);
    examples::shard_module(*model_, mesh_, options);
  }
  tessera::materialize(*model_, [](torch::nn::Module&) {}); // the values come from the file
  folder_.load(*model_);
}

torch::Tensor SentenceEncoder::forward(const std::vector<std::vector<int64_t>>& sentences) {
  return minilm::embed(model_, pad(sentences, tokenizer_.padding()), device_);
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
  if (examples::rank() == 0) folder_.copy_config(folder);
}

} // namespace minilm
