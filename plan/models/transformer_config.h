#pragma once

// Internal: the sizes and ways of a transformer, and the names of its parts. Kinds of models differ in these alone.

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::internal::models {

enum class NormKind {
  kLayer,
  kRms,
  kPlainRms, ///< by operators one after another in fp32
};
enum class Activation { kSilu, kGelu, kGeluTanh, kRelu };
/// What the last block's output goes through.
enum class Head {
  kNone,
  kLanguage,   ///< a table of the vocabulary
  kMasked,     ///< BERT's: a linear layer, a norm, and a table with a bias
  kPooled,     ///< BERT's pooler: tanh of a linear layer of the first position
  kClassifier, ///< a linear layer of the first position
};

struct BlockConfig {
  int64_t width = 0, hidden = 0; ///< features of a token, and inside the feed-forward part
  int64_t heads = 0, key_heads = 0, head_size = 0;
  bool is_causal = false;
  int64_t window = 0; ///< positions that a causal query sees, itself among them; 0: all before
  NormKind norm = NormKind::kLayer;
  double norm_epsilon = 1e-5;
  bool norm_first = true; ///< before attention and feed-forward; otherwise after the sum with what went in
  Activation activation = Activation::kGelu;
  bool is_gated = false; ///< down(activation(gate(x)) · up(x)); otherwise down(activation(up(x)))
  bool query_bias = true, output_bias = true, feed_forward_bias = true;
  double attention_dropout = 0, dropout = 0;
  bool fuses_attention = true;    ///< false: two products, and a softmax of all scores between them
  int64_t experts = 0, top_k = 0; ///< a mixture in place of the feed-forward part; 0: none
};

/// Paths below a block.
struct BlockNames {
  std::string query, key, value; ///< of three linear layers
  std::string packed;            ///< ... or of one that makes all three
  std::string output, attention_norm, feed_forward_norm;
  std::string gate, up, down;
  std::string mixture;
};

/// Paths below the model.
struct ModelNames {
  std::string blocks; ///< a list
  std::string tokens, positions, kinds, embedding_norm;
  std::string patches, first; ///< the projection of patches, and the parameter that is put before them
  std::string norm;
  std::string head, head_dense, head_norm, head_bias;
};

struct TransformerConfig {
  std::string architecture, name;
  std::string prefix; ///< of all but the head, which files of the same model may leave out
  int64_t layers = 0;
  BlockConfig block;
  int64_t vocabulary = 0;
  int64_t positions = 0;                      ///< learned ones; 0: none
  int64_t most_positions = 0;                 ///< that the model was made for
  int64_t kinds = 0;                          ///< of segments, in a table; 0: none
  double rotary_base = 0;                     ///< 0: queries and keys are not rotated
  int64_t image = 0, patch = 0, channels = 0; ///< of pictures in place of tokens: sizes of their sides; 0: tokens
  bool has_embedding_norm = false, has_norm = true;
  Head head = Head::kNone;
  bool is_tied = false; ///< the head is the table of tokens
  int64_t classes = 0;
  bool packs_transposed = false; ///< files have linear weights as [in, out]
  BlockNames block_names;
  ModelNames names;

  bool takes_pictures() const { return image > 0; }
  /// Positions of a row that the blocks see, of `sequence` tokens or of a picture.
  int64_t length(int64_t sequence) const { return takes_pictures() ? (image / patch) * (image / patch) + 1 : sequence; }
};

/// An error that begins with `source`, for sizes that do not fit each other.
void check(const TransformerConfig& config, const std::string& source);

} // namespace tessera::internal::models
