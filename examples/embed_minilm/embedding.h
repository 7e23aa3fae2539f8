#pragma once

#include "embed_minilm/options.h"
#include "embed_minilm/sentence_encoder.h"

namespace minilm {

/// Embeds the sentences of `options.input`; shows each with the one that is most like it, and writes the embeddings to
/// `options.output`. Every rank calls it.
void embed_sentences(SentenceEncoder& encoder, const Options& options);

} // namespace minilm
