#include "finetune/pair_rows.h"

#include <tessera/dtensor/api.h>

#include <algorithm>

namespace finetune {

namespace {

constexpr double kScale = 20;

} // namespace

PairRows::PairRows(const std::string& path, const minilm::Tokenizer& tokenizer, int64_t positions)
    : padding_(tokenizer.padding()) {
  const auto longest = static_cast<size_t>(std::min(minilm::kLongest, positions));
  const auto tokenize = [&](std::string_view text) { return tokenizer.encode(text, longest); };
  pairs_ = std::make_shared<const minilm::Pairs>(minilm::read_pairs(path, tokenize));
  end_ = static_cast<int64_t>(pairs_->size());
}

int64_t PairRows::first_of_last(int64_t rows) const {
  TORCH_CHECK_VALUE(rows >= 0 && rows <= size(), "cannot hold out ", rows, " of ", size(), " pairs");
  return end_ - rows;
}

PairRows PairRows::without_last(int64_t rows) const {
  auto part = *this;
  part.end_ = first_of_last(rows);
  return part;
}

PairRows PairRows::last(int64_t rows) const {
  auto part = *this;
  part.begin_ = first_of_last(rows);
  return part;
}

PairBatch PairRows::get(const std::vector<size_t>& rows) const {
  std::vector<std::vector<int64_t>> sentences;
  for (const auto* side : {&pairs_->first, &pairs_->second}) {
    for (const auto row : rows) sentences.push_back(side->at(static_cast<size_t>(begin_) + row));
  }
  return {minilm::pad(sentences, padding_)};
}

tessera::Loss contrastive_loss(const torch::Tensor& embeddings, const tessera::DeviceMesh& data_mesh) {
  const auto sides = embeddings.chunk(2);
  const auto rows = sides[0].size(0), first = data_mesh.local_rank() * rows;
  const auto seconds = tessera::from_local(sides[1], data_mesh, {tessera::Shard{0}});
  // Each rank computes another part of the loss from all of them, so their gradients are a sum over the ranks.
  const auto all_seconds = seconds.full_tensor(tessera::Placements{tessera::Partial{}});
  const auto scores = torch::matmul(sides[0], all_seconds.t()) * kScale;
  const auto wanted = torch::arange(first, first + rows, torch::TensorOptions(torch::kLong).device(embeddings.device()));
  const auto loss = torch::nn::functional::cross_entropy(scores, wanted,
                                                         torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  const auto count = static_cast<double>(rows);
  return tessera::LossSum{loss, count, {{"found", {(scores.argmax(1) == wanted).sum(), count}}}};
}

} // namespace finetune
