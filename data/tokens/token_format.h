#pragma once

// Internal: what a file of tokens begins and ends with.
//
//   offset  bytes  of Tessera's own format, little-endian
//   0       8      magic "TSRTOKEN"
//   8       4      version, 1
//   12      4      bytes of a token, 2 or 4
//   16      8      tokens
//   24      8      documents
//   32      8      vocabulary: ids are below it; 0: unknown
//   40      8      XXH3 of the table of documents
//   48      8      0
//   56      8      XXH3 of the 56 bytes before
//   64             the tokens, then zeros up to a multiple of 8
//                  the table: 8 bytes for each document, the place of the token after its last

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/data/token_file.h>
#include <tessera/data/tokens/mapped_file.h>

namespace tessera::internal {

struct TokenFileHeader {
  TokenType type = TokenType::kUInt16;
  int64_t tokens = 0, documents = 0, vocabulary = 0;
  int64_t first_byte = 64; ///< of the tokens
};

inline int64_t bytes_of(TokenType type) { return type == TokenType::kUInt16 ? 2 : 4; }

inline constexpr int64_t kTokenHeaderBytes = 64;

/// The header of Tessera's format, for a table with this content.
std::string token_header(const TokenFileHeader& header, const std::vector<int64_t>& document_ends);
/// The byte where the table of documents begins.
int64_t table_offset(const TokenFileHeader& header);

/// Recognizes the format by its magic, and compares the file's size with what it says.
TokenFileHeader read_token_header(const MappedFile& file, std::optional<TokenType> headerless);
/// The table of documents of a file with Tessera's header; checked. Empty for others.
std::vector<int64_t> read_document_ends(const MappedFile& file, const TokenFileHeader& header);

} // namespace tessera::internal
