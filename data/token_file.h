#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace tessera {

enum class TokenType { kUInt16, kUInt32 };

/// Where the documents of a file that does not name them meet: at a token of their own.
struct DocumentSeparator {
  enum class Place {
    kEnds,  ///< each document ends with the token, as nanoGPT writes them
    kBegins ///< each begins with it, as llm.c writes them
  };
  int64_t token = 0;
  Place place = Place::kEnds;
};

struct TokenFileOptions {
  /// A file without any header: numbers of this type from its first byte to its last (nanoGPT's `train.bin`: kUInt16).
  std::optional<TokenType> headerless;
  /// Divides files that do not name their documents, which are read once for it. Otherwise such a file is one document.
  std::optional<DocumentSeparator> separator;
  /// Ids must be below it; 0: below what the file itself says, if anything.
  int64_t vocabulary = 0;
};

namespace internal {
struct TokenData;
} // namespace internal

/// A file of token ids, mapped into memory: what `tessera-tokenize` and TokenFileWriter write (docs/data.md has the format), and
/// llm.c's files of GPT-2 (magic 20240520) and Llama-3 tokens (magic 20240801), which are recognized by their header.
///
/// Opening reads the header and the table of documents, not the tokens. Copies are cheap and share the mapping. All functions may
/// be called from several threads. Local.
class TokenFile {
 public:
  /// Errors name the file and what is wrong: no such file, no known magic, a size other than the header says (a torn copy), a
  /// table of documents that is damaged, no token, no document.
  explicit TokenFile(const std::string& path, const TokenFileOptions& options = {});

  const std::string& path() const;
  int64_t tokens() const;
  TokenType type() const;
  /// Ids are below it; 0: unknown.
  int64_t vocabulary() const;

  int64_t documents() const;
  /// The first token of a document and the one after its last. A document may be empty.
  std::pair<int64_t, int64_t> document(int64_t index) const;
  /// The document that holds a token.
  int64_t document_of(int64_t token) const;

  /// Copies the tokens from `begin` up to `begin + out.size()`. Errors: a range beyond the file; an id that is not in the
  /// vocabulary, with its place; a file that was written or cut since it was opened, or that the disk cannot read. (A file that
  /// another process cuts in the same microseconds ends the process with SIGBUS: write new files beside, and rename them.)
  void read(int64_t begin, std::span<int64_t> out) const;
  /// Reads all tokens; an error for the first id that is not in the vocabulary.
  void verify() const;

 private:
  std::shared_ptr<const internal::TokenData> data_;
};

/// Writes a file of tokens for TokenFile, document by document. The file is under its name once `finish` has returned, as a whole
/// or not at all: an older one of that name stays until then. Local; one thread at a time.
class TokenFileWriter {
 public:
  /// Ids are below `vocabulary`, which chooses the type: up to 65536 ids take 2 bytes each, more take 4. Errors name the folder
  /// or the file, and the cause.
  TokenFileWriter(const std::string& path, int64_t vocabulary);
  TokenFileWriter(TokenFileWriter&&) noexcept;
  TokenFileWriter& operator=(TokenFileWriter&&) noexcept;
  /// Without `finish` nothing stays.
  ~TokenFileWriter();

  /// One document, which may be empty. Errors: an id that is negative or not in the vocabulary, a full disk.
  void add(c10::ArrayRef<int64_t> document);
  int64_t tokens() const;
  int64_t documents() const;
  /// Flushes the file to the disk and gives it its name. An error for a file without any token. Nothing may be added afterwards.
  void finish();

 private:
  class Output;
  std::unique_ptr<Output> output_;
};

} // namespace tessera
