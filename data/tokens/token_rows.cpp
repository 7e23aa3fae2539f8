#include <tessera/data/token_rows.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <tessera/data/tokens/packing.h>

namespace tessera {

namespace {

using internal::Segment;

/// Fills the rows of a batch one after another.
class BatchWriter {
 public:
  BatchWriter(const TokenRowOptions& options, int64_t rows)
      : options_(options), has_documents_(options.packing != Packing::kStream) {
    const auto empty = [&] { return at::empty({rows, options.sequence}, at::TensorOptions(at::kLong)); };
    batch_.inputs = empty();
    batch_.targets = empty();
    if (has_documents_) batch_.positions = empty();
  }

  /// The segments follow each other in the file, and there is one.
  void add_row(const TokenFile& file, const std::vector<Segment>& segments) {
    const auto begin = segments.front().begin, end = segments.back().begin + segments.back().tokens;
    tokens_.resize(static_cast<size_t>(end - begin + (segments.back().predicts_next ? 1 : 0)));
    file.read(begin, tokens_);
    for (const auto& segment : segments) add(segment, tokens_.data() + (segment.begin - begin));
    if (end - begin < options_.sequence) pad(options_.sequence - (end - begin));
  }

  TokenBatch finish() {
    if (!has_documents_) {
      batch_.max_seqlen = options_.sequence;
      return std::move(batch_);
    }
    batch_.cu_seqlens = at::empty({std::ssize(starts_) + 1}, at::TensorOptions(at::kInt));
    auto* const out = batch_.cu_seqlens.mutable_data_ptr<int32_t>();
    std::copy(starts_.begin(), starts_.end(), out);
    out[starts_.size()] = static_cast<int32_t>(at_);
    return std::move(batch_);
  }

 private:
  void add(const Segment& segment, const int64_t* tokens) {
    auto* const targets = place(batch_.targets);
    const auto last = segment.tokens - 1;
    std::copy_n(tokens, segment.tokens, place(batch_.inputs));
    std::copy_n(tokens + 1, last, targets);
    targets[last] = segment.predicts_next ? tokens[segment.tokens] : TokenBatch::kIgnored;
    end_segment(segment.tokens);
  }

  void pad(int64_t tokens) {
    std::fill_n(place(batch_.inputs), tokens, options_.padding);
    std::fill_n(place(batch_.targets), tokens, TokenBatch::kIgnored);
    end_segment(tokens);
  }

  int64_t* place(const at::Tensor& tensor) const { return tensor.mutable_data_ptr<int64_t>() + at_; }

  void end_segment(int64_t tokens) {
    if (has_documents_) {
      std::iota(place(batch_.positions), place(batch_.positions) + tokens, int64_t{0});
      starts_.push_back(at_);
      batch_.max_seqlen = std::max(batch_.max_seqlen, tokens);
    }
    at_ += tokens;
  }

  const TokenRowOptions& options_;
  bool has_documents_;
  TokenBatch batch_;
  std::vector<int64_t> tokens_; // of a row, and its last target
  std::vector<int64_t> starts_; // of the segments
  int64_t at_ = 0;              // in the rows one after another
};

} // namespace

double TokenBatch::counted() const { return at::ne(targets, kIgnored).sum().item<double>(); }

TokenBatch TokenBatch::to(const at::Device& device) const {
  const auto moved = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true) : tensor;
  };
  return {moved(inputs), moved(targets), moved(cu_seqlens), moved(positions), max_seqlen};
}

TokenRows::TokenRows(std::vector<TokenFile> files, const TokenRowOptions& options) : files_(std::move(files)), options_(options) {
  TORCH_CHECK_VALUE(options.sequence > 0, "TokenRows: a sequence of ", options.sequence, " tokens");
  TORCH_CHECK_VALUE(options.packing != Packing::kWholeDocuments || options.document_ends == DocumentEnds::kIgnore,
                    "TokenRows: with Packing::kWholeDocuments a document's last token has no next one to predict (kPredict)");
  TORCH_CHECK_VALUE(!files_.empty(), "TokenRows: there are no files");
  for (const auto& file : files_) {
    const auto vocabulary = file.vocabulary();
    TORCH_CHECK_VALUE(vocabulary == files_.front().vocabulary(), "TokenRows: ", files_.front().path(), " has a vocabulary of ",
                      files_.front().vocabulary(), " ids, and ", file.path(), " one of ", vocabulary);
    TORCH_CHECK_VALUE(options.padding >= 0 && (vocabulary == 0 || options.padding < vocabulary), "TokenRows of ", file.path(),
                      ": the padding ", options.padding, " is not in the vocabulary of ", vocabulary, " ids");
    plans_.push_back(internal::plan_rows(file, options));
    TORCH_CHECK_VALUE(plans_.back()->rows() > 0, "TokenRows of ", file.path(), ": its ", file.tokens(),
                      " tokens are too few for a row of ", options.sequence,
                      " and its last target: take shorter rows, or LastTokens::kPad");
    row_ends_.push_back(size() + plans_.back()->rows());
  }
}

int64_t TokenRows::size() const { return row_ends_.empty() ? 0 : row_ends_.back(); }

TokenBatch TokenRows::get(const std::vector<size_t>& rows) const {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(std::ssize(rows) <= kMostTokens / options_.sequence, "TokenRows: a batch of ", rows.size(), " rows of ",
                    options_.sequence, " tokens is too large");
  BatchWriter writer(options_, std::ssize(rows));
  for (const auto each : rows) {
    const auto row = static_cast<int64_t>(each);
    TORCH_CHECK_INDEX(row < size(), "TokenRows: row ", row, " of ", size());
    const auto file = static_cast<size_t>(std::upper_bound(row_ends_.begin(), row_ends_.end(), row) - row_ends_.begin());
    writer.add_row(files_[file], plans_[file]->segments(row - (file == 0 ? 0 : row_ends_[file - 1])));
  }
  return writer.finish();
}

} // namespace tessera
