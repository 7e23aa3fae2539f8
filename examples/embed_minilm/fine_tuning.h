#pragma once

#include "embed_minilm/options.h"
#include "embed_minilm/sentence_encoder.h"

namespace minilm {

/// The contrastive loss with in-batch negatives that the model was trained with: the mean cross entropy of finding row i of
/// `second` among all its rows from row i of `first`, by 20 × the cosine. Both [pairs, width], of unit rows, and the loss is a
/// scalar; all plain, or all DTensors.
torch::Tensor contrastive_loss(const torch::Tensor& first, const torch::Tensor& second);

/// Trains the encoder on `options.pairs`. Every rank calls it. The loss of a step is that of its whole batch, so the losses do
/// not depend on the number of ranks.
void fine_tune(SentenceEncoder& encoder, const Options& options);

} // namespace minilm
