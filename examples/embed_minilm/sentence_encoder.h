#pragma once

#include <tessera/mesh/device_mesh.h>

#include <string>
#include <string_view>
#include <vector>

#include "embed_minilm/bert.h"
#include "embed_minilm/model_folder.h"
#include "embed_minilm/options.h"
#include "embed_minilm/tokenizer.h"

namespace minilm {

/// The rows lo … hi - 1 of a batch that one rank holds.
struct RowRange {
  int64_t lo, hi;
};

/// A pretrained BERT that turns sentences into unit vectors: the mean of their tokens' features, normalized. Its parameters are
/// sharded as the options say; every rank makes one, with the same options, after `join_job`, and all calls but `tokenize` are
/// for all ranks.
class SentenceEncoder {
 public:
  /// Builds the model without memory, shards it, gives every rank memory for its part, and reads that part from the file.
  explicit SentenceEncoder(const Options& options);

  /// The word pieces of a sentence: at most 256 (or the model's positions), what is beyond is cut off. Local.
  std::vector<int64_t> tokenize(std::string_view sentence) const { return tokenizer_.encode(sentence, longest_); }

  /// The embeddings [sentences, width] of this rank's sentences, of which there may be none. Differentiable.
  torch::Tensor forward(const std::vector<std::vector<int64_t>>& sentences);

  /// The embeddings of all `sentences`, `batch` at a time a rank; `sentences` are the same on all ranks. Without gradients. The
  /// result is as `over_ranks` makes it.
  torch::Tensor embed(const std::vector<std::vector<int64_t>>& sentences, int64_t batch);

  /// This rank's share of `rows` rows.
  RowRange share(int64_t rows) const;
  /// The tensor with `rows` rows of which every rank holds its share: a DTensor, or `local` itself without a mesh.
  torch::Tensor over_ranks(const torch::Tensor& local, int64_t rows) const;

  /// Writes the model in the form in which it was read, as a new folder.
  void save(const std::string& folder) const;

  Bert& model() { return model_; }

 private:
  Options options_;
  ModelFolder folder_;
  Bert model_;
  Tokenizer tokenizer_;
  tessera::DeviceMesh mesh_, rows_; // both undefined without a strategy; `rows_` has all ranks in one dim
  torch::Device device_;
  size_t longest_; // word pieces
};

} // namespace minilm
