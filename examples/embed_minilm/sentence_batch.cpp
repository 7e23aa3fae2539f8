#include "embed_minilm/sentence_batch.h"

#include <algorithm>

namespace minilm {

SentenceBatch pad(const std::vector<std::vector<int64_t>>& sentences, int64_t padding) {
  size_t longest = 1;
  for (const auto& ids : sentences) longest = std::max(longest, ids.size());
  const std::vector<int64_t> shape{static_cast<int64_t>(sentences.size()), static_cast<int64_t>(longest)};
  SentenceBatch batch{torch::full(shape, padding, torch::kLong), torch::zeros(shape, torch::kBool)};
  for (int64_t row = 0; row < shape[0]; ++row) {
    const auto& ids = sentences[static_cast<size_t>(row)];
    const auto length = static_cast<int64_t>(ids.size());
    batch.tokens[row].narrow(0, 0, length).copy_(torch::tensor(ids, torch::kLong));
    batch.mask[row].narrow(0, 0, length).fill_(true);
  }
  return batch;
}

torch::Tensor embed(Bert& model, const SentenceBatch& batch, torch::Device device) {
  const auto mask = batch.mask.to(device);
  const auto features = model->forward(batch.tokens.to(device), mask).to(torch::kFloat);
  const auto weights = mask.unsqueeze(-1).to(torch::kFloat);
  const auto mean = (features * weights).sum(1) / weights.sum(1);
  return torch::nn::functional::normalize(mean, torch::nn::functional::NormalizeFuncOptions().dim(1));
}

} // namespace minilm
