#include <tessera/data/tokens/packing.h>

#include <algorithm>
#include <utility>

namespace tessera::internal {

namespace {

/// The tokens one after another, cut into rows.
class StreamRows final : public RowPlan {
 public:
  StreamRows(TokenFile file, const TokenRowOptions& options) : file_(std::move(file)), options_(options) {}

  int64_t rows() const override {
    const auto with_target = file_.tokens() - 1, sequence = options_.sequence;
    return options_.last_tokens == LastTokens::kPad ? (with_target + sequence - 1) / sequence : with_target / sequence;
  }

  std::vector<Segment> segments(int64_t row) const override {
    const auto begin = row * options_.sequence, end = std::min(begin + options_.sequence, file_.tokens());
    const bool ignores_ends = options_.document_ends == DocumentEnds::kIgnore;
    if (options_.packing == Packing::kStream && !ignores_ends) return {{begin, end - begin, end < file_.tokens()}};
    std::vector<Segment> found;
    for (auto at = begin, document = file_.document_of(begin); at < end; ++document) {
      const auto document_end = file_.document(document).second, segment_end = std::min(document_end, end);
      if (segment_end == at) continue; // an empty document
      const bool is_last_token = segment_end == file_.tokens(), ends_document = segment_end == document_end;
      found.push_back({at, segment_end - at, !is_last_token && !(ends_document && ignores_ends)});
      at = segment_end;
    }
    return found;
  }

 private:
  TokenFile file_;
  TokenRowOptions options_;
};

/// Whole documents, each in the current row where it fits.
class WholeDocumentRows final : public RowPlan {
 public:
  WholeDocumentRows(TokenFile file, int64_t sequence) : file_(std::move(file)), sequence_(sequence) {
    int64_t room = 0;
    for (int64_t document = 0; document < file_.documents(); ++document) {
      auto [begin, end] = file_.document(document);
      for (; begin < end; begin += sequence_) {
        const auto piece = std::min(end - begin, sequence_);
        if (piece > room) {
          first_pieces_.push_back(begin);
          room = sequence_;
        }
        room -= piece;
      }
    }
    first_pieces_.push_back(file_.tokens());
  }

  int64_t rows() const override { return std::ssize(first_pieces_) - 1; }

  std::vector<Segment> segments(int64_t row) const override {
    const auto begin = first_pieces_[static_cast<size_t>(row)], end = first_pieces_[static_cast<size_t>(row) + 1];
    std::vector<Segment> found;
    for (auto at = begin, document = file_.document_of(begin); at < end; ++document) {
      const auto document_end = file_.document(document).second, segment_end = std::min(document_end, end);
      if (segment_end == at) continue; // an empty document
      found.push_back({at, segment_end - at, segment_end < document_end});
      at = segment_end;
    }
    return found;
  }

 private:
  TokenFile file_;
  int64_t sequence_;
  std::vector<int64_t> first_pieces_; ///< the first token of each row, then the number of tokens
};

} // namespace

std::unique_ptr<RowPlan> plan_rows(const TokenFile& file, const TokenRowOptions& options) {
  if (options.packing == Packing::kWholeDocuments) return std::make_unique<WholeDocumentRows>(file, options.sequence);
  return std::make_unique<StreamRows>(file, options);
}

} // namespace tessera::internal
