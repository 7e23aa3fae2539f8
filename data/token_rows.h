#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <tessera/data/row_source.h>
#include <tessera/data/token_file.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Rows of tokens with what is to be predicted from them.
struct TokenBatch {
  /// The target that no loss counts: the `ignore_index` of LibTorch's cross_entropy.
  static constexpr int64_t kIgnored = -100;

  at::Tensor inputs;  ///< [rows, sequence] int64
  at::Tensor targets; ///< [rows, sequence] int64: the token after each input, or kIgnored
  /// Undefined with Packing::kStream. [segments + 1] int32: where the segments begin in the rows one after another, then
  /// rows × sequence: what attention on sequences of different lengths takes. A segment is a document's part of a row, or a row's
  /// padding.
  at::Tensor cu_seqlens;
  at::Tensor positions;   ///< undefined with Packing::kStream; [rows, sequence] int64: the place in the segment, from 0
  int64_t max_seqlen = 0; ///< tokens of the longest segment

  /// The targets that count: the divisor of a mean. Waits for a device.
  double counted() const;
  /// The same on a device; the copy does not wait where the memory is pinned.
  TokenBatch to(const at::Device& device) const;
};

/// How documents are put into rows.
enum class Packing {
  kStream,    ///< the file's tokens one after another, cut into rows; attention sees all of a row
  kDocuments, ///< the same rows, with cu_seqlens and positions, so that attention sees its own document alone
  /// Rows hold whole documents, in the order of the file: each goes into the current row where it fits, otherwise into a new one;
  /// what is left of a row is padding. One that is longer than a row is cut into full rows and a rest. With cu_seqlens and
  /// positions.
  kWholeDocuments
};

/// What the last token of a document predicts.
enum class DocumentEnds {
  kIgnore, ///< nothing: its target is TokenBatch::kIgnored
  kPredict ///< the first token of the next one, if that is in the file; not with kWholeDocuments
};

/// What happens to the tokens after the last full row of kStream and kDocuments.
enum class LastTokens {
  kDrop, ///< they are left out
  kPad   ///< they are a row with padding, as an evaluation of the whole file needs it
};

struct TokenRowOptions {
  int64_t sequence = 1024; ///< tokens of a row
  Packing packing = Packing::kStream;
  DocumentEnds document_ends = DocumentEnds::kIgnore;
  LastTokens last_tokens = LastTokens::kDrop;
  int64_t padding = 0; ///< the input in a row's padding, whose targets are ignored
};

namespace internal {
struct Segment;
class RowPlan;
} // namespace internal

/// The rows of token files, one file after the other: random-access data for a RowSource. Row i of a file with kStream and
/// kDocuments begins with its token i × sequence, and the last target of a row is the first input of the next. Copies share what
/// they hold. Local.
class TokenRows {
 public:
  /// Errors: no file; files of different vocabularies; a sequence that is not positive; a file too short for one row and its last
  /// target; kWholeDocuments with kPredict; a padding that is no id of the vocabulary.
  TokenRows(std::vector<TokenFile> files, const TokenRowOptions& options);
  TokenRows(TokenFile file, const TokenRowOptions& options) : TokenRows(std::vector{std::move(file)}, options) {}

  int64_t size() const;
  /// The errors of TokenFile::read, and a row that there is not.
  TokenBatch get(const std::vector<size_t>& rows) const;
  const std::vector<TokenFile>& files() const { return files_; }

 private:
  std::vector<TokenFile> files_;
  TokenRowOptions options_;
  std::vector<std::shared_ptr<const internal::RowPlan>> plans_; ///< of the files
  std::vector<int64_t> row_ends_;                               ///< of the files: the row after the last one
};

/// A RowSource of token files: this rank's micro-batches of `rows.batch` rows. Rows of all files are shuffled together.
inline RowSource<TokenRows> token_source(std::vector<TokenFile> files, const TokenRowOptions& tokens, const DeviceMesh& data_mesh,
                                         const RowOptions& rows) {
  return {TokenRows(std::move(files), tokens), data_mesh, rows};
}
inline RowSource<TokenRows> token_source(const std::string& path, const TokenRowOptions& tokens, const DeviceMesh& data_mesh,
                                         const RowOptions& rows) {
  return token_source(std::vector{TokenFile(path)}, tokens, data_mesh, rows);
}

} // namespace tessera
