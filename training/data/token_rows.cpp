#include <tessera/training/token_rows.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <tessera/training/data/packing.h>

namespace tessera {

namespace {

using internal::Segment;

/// Fills the rows of a batch one after another.
class BatchWriter {
 public:
  BatchWriter(const TokenFile& file, const TokenRowOptions& options, int64_t rows)
      : file_(file), options_(options), has_documents_(options.packing != Packing::kStream) {
    const auto empty = [&] { return at::empty({rows, options.sequence}, at::TensorOptions(at::kLong)); };
    batch_.inputs = empty();
    batch_.targets = empty();
    if (has_documents_) batch_.positions = empty();
  }

  /// The segments follow each other in the file, and there is one.
  void add_row(const std::vector<Segment>& segments) {
    const auto begin = segments.front().begin, end = segments.back().begin + segments.back().tokens;
    tokens_.resize(static_cast<size_t>(end - begin + (segments.back().predicts_next ? 1 : 0)));
    file_.read(begin, tokens_);
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

  const TokenFile& file_;
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

TokenRows::TokenRows(TokenFile file, const TokenRowOptions& options) : file_(std::move(file)), options_(options) {
  const auto& path = file_.path();
  TORCH_CHECK_VALUE(options.sequence > 0, "TokenRows of ", path, ": a sequence of ", options.sequence, " tokens");
  TORCH_CHECK_VALUE(options.packing != Packing::kWholeDocuments || options.document_ends == DocumentEnds::kIgnore,
                    "TokenRows of ", path,
                    ": with Packing::kWholeDocuments a document's last token has no next one to predict (kPredict)");
  TORCH_CHECK_VALUE(options.padding >= 0 && (file_.vocabulary() == 0 || options.padding < file_.vocabulary()), "TokenRows of ",
                    path, ": the padding ", options.padding, " is not in the vocabulary of ", file_.vocabulary(), " ids");
  plan_ = internal::plan_rows(file_, options);
  TORCH_CHECK_VALUE(plan_->rows() > 0, "TokenRows of ", path, ": its ", file_.tokens(), " tokens are too few for a row of ",
                    options.sequence, " and its last target: take shorter rows, or LastTokens::kPad");
}

int64_t TokenRows::size() const { return plan_->rows(); }

TokenBatch TokenRows::get(const std::vector<size_t>& rows) const {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(std::ssize(rows) <= kMostTokens / options_.sequence, "TokenRows of ", file_.path(), ": a batch of ",
                    rows.size(), " rows of ", options_.sequence, " tokens is too large");
  BatchWriter writer(file_, options_, std::ssize(rows));
  for (const auto row : rows) {
    TORCH_CHECK_INDEX(static_cast<int64_t>(row) < size(), "TokenRows of ", file_.path(), ": row ", row, " of ", size());
    writer.add_row(plan_->segments(static_cast<int64_t>(row)));
  }
  return writer.finish();
}

} // namespace tessera
