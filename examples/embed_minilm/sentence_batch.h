#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "embed_minilm/bert.h"

namespace minilm {

inline constexpr int64_t kLongest = 256; ///< word pieces, as the model was trained; longer sentences are cut off

/// Sentences of one forward, padded to the longest: both [sentences, time].
struct SentenceBatch {
  torch::Tensor tokens; ///< int64
  torch::Tensor mask;   ///< bool: true for tokens, false for padding
};

/// Of the word pieces of each sentence, which has at least one. Without sentences the time is 1.
SentenceBatch pad(const std::vector<std::vector<int64_t>>& sentences, int64_t padding);

/// The unit vectors [sentences, hidden_size], in fp32: the mean of a sentence's features, normalized. Differentiable.
torch::Tensor embed(Bert& model, const SentenceBatch& batch, torch::Device device);

} // namespace minilm
