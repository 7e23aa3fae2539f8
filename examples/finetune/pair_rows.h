#pragma once

#include <tessera/mesh/device_mesh.h>
#include <tessera/training/trainer_events.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "embed_minilm/model_folder.h"
#include "embed_minilm/sentence_batch.h"
#include "embed_minilm/sentences.h"

namespace finetune {

/// Pairs of sentences: rows 0 … rows() - 1 are the first ones, those after them the second ones, in the same order.
struct PairBatch {
  minilm::SentenceBatch sentences;
  int64_t rows() const { return sentences.tokens.size(0) / 2; }
};

/// A range of the pairs of a file, to be read in any order: what a RowSource takes. Copies share the pairs.
class PairRows {
 public:
  /// All pairs of the file, two sentences a line with a tab between them, for a model with so many positions.
  PairRows(const std::string& path, const minilm::Tokenizer& tokenizer, int64_t positions);

  int64_t size() const { return end_ - begin_; }
  PairBatch get(const std::vector<size_t>& rows) const;

  /// The pairs without the last `rows`, and those alone. An error where there are not so many.
  PairRows without_last(int64_t rows) const;
  PairRows last(int64_t rows) const;

 private:
  int64_t first_of_last(int64_t rows) const;

  std::shared_ptr<const minilm::Pairs> pairs_;
  int64_t padding_, begin_ = 0, end_;
};

/// The contrastive loss with in-batch negatives that the model was trained with: the cross entropy of finding the second sentence
/// of a pair from the first, among those of all ranks, by 20 × the cosine. `embeddings` [2 × pairs, width] are those of a
/// PairBatch. All ranks of `data_mesh`, which has one dim, call it with equally many pairs. Also "found": how many are.
tessera::Loss contrastive_loss(const torch::Tensor& embeddings, const tessera::DeviceMesh& data_mesh);

} // namespace finetune
