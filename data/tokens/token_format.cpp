#include <tessera/data/tokens/token_format.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include <tessera/checkpoint/bytes/checksum.h>

namespace tessera::internal {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kTokenMagic = "TSRTOKEN";
constexpr uint32_t kTokenVersion = 1;

struct OwnHeader {
  std::array<char, 8> magic;
  uint32_t version, token_bytes;
  uint64_t tokens, documents, vocabulary, table_checksum, reserved, checksum;
};
static_assert(sizeof(OwnHeader) == kTokenHeaderBytes);

// llm.c's: 256 int32, of which the first three are magic, version and the number of tokens.
struct LlmHeader {
  int32_t magic, version, tokens;
};
constexpr int64_t kLlmHeaderBytes = 1024;
constexpr int32_t kLlmGpt2 = 20240520, kLlmGpt2Version = 1, kLlmLlama3 = 20240801, kLlmLlama3Version = 7;

template <typename T>
T read_as(const MappedFile& file, int64_t offset = 0) {
  T value{};
  file.copy(offset, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

uint64_t checksum_of(const OwnHeader& header) { return checksum(&header, offsetof(OwnHeader, checksum)); }
uint64_t checksum_of(const std::vector<int64_t>& ends) { return checksum(ends.data(), ends.size() * sizeof(int64_t)); }

bool is_own(const MappedFile& file) {
  if (file.size() < static_cast<int64_t>(kTokenMagic.size())) return false;
  const auto magic = read_as<std::array<char, 8>>(file);
  return std::string_view(magic.data(), magic.size()) == kTokenMagic;
}

void check_size(const MappedFile& file, int64_t expected, const TokenFileHeader& header) {
  TORCH_CHECK(file.size() == expected, file.path(), " is torn: its header says ", header.tokens, " tokens and ", header.documents,
              " documents, which are ", expected, " bytes, and it has ", file.size());
}

TokenFileHeader read_own(const MappedFile& file) {
  TORCH_CHECK(file.size() >= kTokenHeaderBytes, file.path(), " is torn: its ", file.size(), " bytes are less than a header");
  const auto own = read_as<OwnHeader>(file);
  TORCH_CHECK(own.version == kTokenVersion, file.path(), " has version ", own.version,
              " of the format; this program reads version ", kTokenVersion);
  TORCH_CHECK(own.checksum == checksum_of(own) && (own.token_bytes == 2 || own.token_bytes == 4) && own.tokens < (1ULL << 56) &&
                  own.documents < (1ULL << 56) && own.vocabulary < (1ULL << 56),
              file.path(), ": the header is damaged: its checksum does not fit");
  TokenFileHeader header{own.token_bytes == 2 ? TokenType::kUInt16 : TokenType::kUInt32, static_cast<int64_t>(own.tokens),
                         static_cast<int64_t>(own.documents), static_cast<int64_t>(own.vocabulary), kTokenHeaderBytes};
  check_size(file, table_offset(header) + header.documents * 8, header);
  return header;
}

/// None for a file that is not llm.c's.
std::optional<TokenFileHeader> read_llm(const MappedFile& file) {
  if (file.size() < kLlmHeaderBytes) return std::nullopt;
  const auto llm = read_as<LlmHeader>(file);
  if (llm.magic != kLlmGpt2 && llm.magic != kLlmLlama3) return std::nullopt;
  const bool is_gpt2 = llm.magic == kLlmGpt2;
  const auto version = is_gpt2 ? kLlmGpt2Version : kLlmLlama3Version;
  TORCH_CHECK(llm.version == version, file.path(), " has the magic ", llm.magic, " of llm.c with version ", llm.version,
              "; this program reads version ", version);
  TORCH_CHECK(llm.tokens >= 0, file.path(), " has a header of llm.c that says ", llm.tokens, " tokens");
  TokenFileHeader header{is_gpt2 ? TokenType::kUInt16 : TokenType::kUInt32, llm.tokens, 0, 0, kLlmHeaderBytes};
  check_size(file, kLlmHeaderBytes + header.tokens * bytes_of(header.type), header);
  return header;
}

TokenFileHeader headerless_file(const MappedFile& file, TokenType type) {
  TORCH_CHECK(file.size() % bytes_of(type) == 0, file.path(), " is torn: its ", file.size(),
              " bytes are no whole number of tokens of ", bytes_of(type), " bytes");
  return {type, file.size() / bytes_of(type), 0, 0, 0};
}

} // namespace

int64_t table_offset(const TokenFileHeader& header) {
  return header.first_byte + (header.tokens * bytes_of(header.type) + 7) / 8 * 8;
}

std::string token_header(const TokenFileHeader& header, const std::vector<int64_t>& document_ends) {
  OwnHeader own{{},
                kTokenVersion,
                static_cast<uint32_t>(bytes_of(header.type)),
                static_cast<uint64_t>(header.tokens),
                static_cast<uint64_t>(header.documents),
                static_cast<uint64_t>(header.vocabulary),
                checksum_of(document_ends),
                0,
                0};
  std::copy(kTokenMagic.begin(), kTokenMagic.end(), own.magic.begin());
  own.checksum = checksum_of(own);
  std::string bytes(sizeof own, '\0');
  std::memcpy(bytes.data(), &own, sizeof own);
  return bytes;
}

TokenFileHeader read_token_header(const MappedFile& file, std::optional<TokenType> headerless) {
  TokenFileHeader header;
  if (headerless) {
    header = headerless_file(file, *headerless);
  } else if (is_own(file)) {
    header = read_own(file);
  } else {
    const auto llm = read_llm(file);
    TORCH_CHECK(llm, file.path(), " is no file of tokens: it begins neither with \"", kTokenMagic,
                "\" (tessera-tokenize) nor with ", kLlmGpt2, " or ", kLlmLlama3,
                " (llm.c); for one without a header set TokenFileOptions::headerless");
    header = *llm;
  }
  TORCH_CHECK(header.tokens > 0, file.path(), " has no tokens");
  return header;
}

std::vector<int64_t> read_document_ends(const MappedFile& file, const TokenFileHeader& header) {
  if (header.first_byte != kTokenHeaderBytes) return {};
  TORCH_CHECK(header.documents > 0, file.path(), " has no documents");
  std::vector<int64_t> ends(static_cast<size_t>(header.documents));
  file.copy(table_offset(header), std::as_writable_bytes(std::span(ends)));
  const auto own = read_as<OwnHeader>(file);
  TORCH_CHECK(own.table_checksum == checksum_of(ends), file.path(),
              ": the table of documents is damaged: its checksum does not fit");
  TORCH_CHECK(ends.front() >= 0 && std::is_sorted(ends.begin(), ends.end()) && ends.back() == header.tokens, file.path(),
              ": the documents of the table do not follow each other up to the last of ", header.tokens, " tokens");
  return ends;
}

} // namespace tessera::internal
