#include <tessera/data/token_file.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <span>
#include <vector>

#include <tessera/data/tokens/mapped_file.h>
#include <tessera/data/tokens/token_format.h>

namespace tessera {

namespace internal {

struct TokenData {
  TokenData(const std::string& path, const TokenFileOptions& options);
  void read(int64_t begin, std::span<int64_t> out) const;

  MappedFile file;
  TokenFileHeader header;
  std::vector<int64_t> ends; ///< of the documents

 private:
  template <typename Stored>
  void read_as(int64_t begin, std::span<int64_t> out) const;
  void check_ids(int64_t begin, c10::ArrayRef<int64_t> ids) const;
  std::vector<int64_t> ends_at(const DocumentSeparator& separator) const;
};

namespace {

constexpr int64_t kTokensAtOnce = int64_t{1} << 18; // tokens that are read at once where a file is read as a whole

} // namespace

TokenData::TokenData(const std::string& path, const TokenFileOptions& options)
    : file(path), header(read_token_header(file, options.headerless)), ends(read_document_ends(file, header)) {
  TORCH_CHECK_VALUE(options.vocabulary >= 0, "TokenFile ", path, ": a vocabulary of ", options.vocabulary, " ids");
  TORCH_CHECK_VALUE(ends.empty() || !options.separator, "TokenFile ", path,
                    ": the file names its documents, so that they have no separator");
  if (options.vocabulary > 0) header.vocabulary = options.vocabulary;
  if (!ends.empty()) return;
  ends = options.separator ? ends_at(*options.separator) : std::vector{header.tokens};
}

template <typename Stored>
void TokenData::read_as(int64_t begin, std::span<int64_t> out) const {
  std::vector<Stored> stored(out.size());
  file.copy(header.first_byte + begin * static_cast<int64_t>(sizeof(Stored)), std::as_writable_bytes(std::span(stored)));
  std::copy(stored.begin(), stored.end(), out.begin());
}

void TokenData::check_ids(int64_t begin, c10::ArrayRef<int64_t> ids) const {
  if (header.vocabulary == 0) return;
  const auto wrong = std::find_if(ids.begin(), ids.end(), [&](int64_t id) { return id >= header.vocabulary; });
  TORCH_CHECK(wrong == ids.end(), file.path(), ": token ", begin + (wrong - ids.begin()), " is ", *wrong,
              ", which is not in the vocabulary of ", header.vocabulary, " ids");
}

void TokenData::read(int64_t begin, std::span<int64_t> out) const {
  const auto end = begin + static_cast<int64_t>(out.size());
  TORCH_CHECK_VALUE(begin >= 0 && end <= header.tokens, file.path(), ": tokens ", begin, " to ", end, " of ", header.tokens);
  header.type == TokenType::kUInt16 ? read_as<uint16_t>(begin, out) : read_as<uint32_t>(begin, out);
  check_ids(begin, out);
}

std::vector<int64_t> TokenData::ends_at(const DocumentSeparator& separator) const {
  const int64_t after = separator.place == DocumentSeparator::Place::kEnds ? 1 : 0;
  std::vector<int64_t> found, piece;
  for (int64_t begin = 0; begin < header.tokens; begin += kTokensAtOnce) {
    piece.resize(static_cast<size_t>(std::min(kTokensAtOnce, header.tokens - begin)));
    read(begin, piece);
    for (size_t i = 0; i < piece.size(); ++i) {
      const auto end = begin + static_cast<int64_t>(i) + after;
      if (piece[i] == separator.token && end > 0) found.push_back(end);
    }
  }
  if (found.empty() || found.back() != header.tokens) found.push_back(header.tokens);
  return found;
}

} // namespace internal

TokenFile::TokenFile(const std::string& path, const TokenFileOptions& options)
    : data_(std::make_shared<const internal::TokenData>(path, options)) {}

const std::string& TokenFile::path() const { return data_->file.path(); }
int64_t TokenFile::tokens() const { return data_->header.tokens; }
TokenType TokenFile::type() const { return data_->header.type; }
int64_t TokenFile::vocabulary() const { return data_->header.vocabulary; }
int64_t TokenFile::documents() const { return std::ssize(data_->ends); }

std::pair<int64_t, int64_t> TokenFile::document(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < documents(), path(), ": document ", index, " of ", documents());
  const auto i = static_cast<size_t>(index);
  return {i == 0 ? 0 : data_->ends[i - 1], data_->ends[i]};
}

int64_t TokenFile::document_of(int64_t token) const {
  TORCH_CHECK_INDEX(token >= 0 && token < tokens(), path(), ": token ", token, " of ", tokens());
  return std::upper_bound(data_->ends.begin(), data_->ends.end(), token) - data_->ends.begin();
}

void TokenFile::read(int64_t begin, std::span<int64_t> out) const { data_->read(begin, out); }

void TokenFile::verify() const {
  std::vector<int64_t> piece;
  for (int64_t begin = 0; begin < tokens(); begin += internal::kTokensAtOnce) {
    piece.resize(static_cast<size_t>(std::min(internal::kTokensAtOnce, tokens() - begin)));
    read(begin, piece);
  }
}

} // namespace tessera
