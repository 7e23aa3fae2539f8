#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/folder_names.h>
#include <tessera/data/token_file.h>
#include <tessera/data/tokens/token_format.h>

namespace tessera {

namespace {

constexpr size_t kWriteBuffer = size_t{1} << 20;

void append_token(std::string& bytes, int64_t id, TokenType type) {
  const auto value = static_cast<uint32_t>(id);
  bytes.append(reinterpret_cast<const char*>(&value), static_cast<size_t>(internal::bytes_of(type))); // little-endian
}

} // namespace

class TokenFileWriter::Output {
 public:
  Output(const std::string& path, int64_t vocabulary)
      : path_(path),
        partial_(internal::hidden_name(std::filesystem::absolute(path), "partial")),
        file_(internal::File::create(partial_)) {
    header_.type = vocabulary <= 65536 ? TokenType::kUInt16 : TokenType::kUInt32;
    header_.vocabulary = vocabulary;
    offset_ = header_.first_byte;
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (!is_finished_) internal::remove_tree(partial_);
  }

  void add(c10::ArrayRef<int64_t> document) {
    TORCH_CHECK_VALUE(!is_finished_, "TokenFileWriter: ", path_, " is finished");
    const auto wrong =
        std::find_if(document.begin(), document.end(), [&](int64_t id) { return id < 0 || id >= header_.vocabulary; });
    TORCH_CHECK_VALUE(wrong == document.end(), "TokenFileWriter: document ", ends_.size(), " of ", path_, " has the id ", *wrong,
                      ", which is not in the vocabulary of ", header_.vocabulary, " ids");
    for (const auto id : document) {
      append_token(buffer_, id, header_.type);
      if (buffer_.size() >= kWriteBuffer) write_buffer();
    }
    header_.tokens += static_cast<int64_t>(document.size());
    ends_.push_back(header_.tokens);
  }

  void finish() {
    TORCH_CHECK_VALUE(!is_finished_, "TokenFileWriter: ", path_, " is finished");
    TORCH_CHECK_VALUE(header_.tokens > 0, "TokenFileWriter: ", path_, " would have no tokens");
    write_buffer();
    header_.documents = std::ssize(ends_);
    const auto padding = internal::table_offset(header_) - offset_;
    file_.write_at(std::string(static_cast<size_t>(padding), '\0').data(), static_cast<size_t>(padding), offset_);
    file_.write_at(ends_.data(), ends_.size() * sizeof(int64_t), internal::table_offset(header_));
    const auto header = internal::token_header(header_, ends_);
    file_.write_at(header.data(), header.size(), 0);
    file_.sync_and_close();
    TORCH_CHECK(std::rename(partial_.c_str(), path_.c_str()) == 0, "cannot rename ", partial_.string(), " to ", path_, ": ",
                std::strerror(errno));
    is_finished_ = true;
  }

  int64_t tokens() const { return header_.tokens; }
  int64_t documents() const { return std::ssize(ends_); }

 private:
  void write_buffer() {
    file_.write_at(buffer_.data(), buffer_.size(), offset_);
    offset_ += std::ssize(buffer_);
    buffer_.clear();
  }

  std::string path_;
  std::filesystem::path partial_;
  internal::File file_;
  internal::TokenFileHeader header_;
  std::vector<int64_t> ends_;
  std::string buffer_;
  int64_t offset_ = 0;
  bool is_finished_ = false;
};

TokenFileWriter::TokenFileWriter(const std::string& path, int64_t vocabulary) {
  TORCH_CHECK_VALUE(vocabulary > 0 && vocabulary <= int64_t{1} << 32, "TokenFileWriter ", path, ": a vocabulary of ", vocabulary,
                    " ids");
  output_ = std::make_unique<Output>(path, vocabulary);
}
TokenFileWriter::TokenFileWriter(TokenFileWriter&&) noexcept = default;
TokenFileWriter& TokenFileWriter::operator=(TokenFileWriter&&) noexcept = default;
TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::add(c10::ArrayRef<int64_t> document) { output_->add(document); }
int64_t TokenFileWriter::tokens() const { return output_->tokens(); }
int64_t TokenFileWriter::documents() const { return output_->documents(); }
void TokenFileWriter::finish() { output_->finish(); }

} // namespace tessera
