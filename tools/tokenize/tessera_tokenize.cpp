// Tokenizes text into a file of tokens, as a tokenizer.json says.
#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/base/per_thread.h>
#include <tessera/data/prefetch.h>
#include <tessera/data/token_file.h>

#include <algorithm>
#include <map>
#include <thread>
#include <utility>

#include "documents.h"
#include "tokenizer.h"

ABSL_FLAG(std::string, tokenizer, "", "a tokenizer.json of Hugging Face");
ABSL_FLAG(std::string, o, "", "the file of tokens to write");
ABSL_FLAG(std::string, documents, "files", "what is a document: files, lines (that are not blank), or jsonl (a line's --field)");
ABSL_FLAG(std::string, field, "text", "the field of a JSON object that holds the text");
ABSL_FLAG(std::string, begin, "", "a token to put before each document");
ABSL_FLAG(std::string, end, "", "a token to put after each document, such as <|endoftext|>");
ABSL_FLAG(bool, special_tokens, true, "add the special tokens that the tokenizer's post_processor adds, such as [CLS] and [SEP]");
ABSL_FLAG(int64_t, threads, 0, "threads that tokenize; 0: one for each processor");

namespace tokenize {

namespace {

constexpr const char* kUsage = R"(tessera-tokenize --tokenizer tokenizer.json in.txt… -o out.bin

Writes the token ids of all documents to a file that tessera::TokenFile reads, in the order of the files. Ids are those of Hugging
Face's library `tokenizers`. What it does not support of a tokenizer.json is an error that names it.)";

constexpr size_t kBytesAtOnce = size_t{1} << 20;
constexpr int64_t kChunksAhead = 2; // for each thread

/// Documents that one thread tokenizes at once.
struct Chunk {
  std::vector<Document> documents;
  std::vector<std::vector<int64_t>> tokens;
};

/// What is put around each document.
struct Settings {
  std::vector<int64_t> begin, end;
  bool adds_special_tokens;
};

DocumentsBy documents_by() {
  const std::map<std::string, DocumentsBy> kinds{
      {"files", DocumentsBy::kFiles}, {"lines", DocumentsBy::kLines}, {"jsonl", DocumentsBy::kJsonl}};
  const auto found = kinds.find(absl::GetFlag(FLAGS_documents));
  TORCH_CHECK_VALUE(found != kinds.end(), "--documents is files, lines or jsonl, not ", absl::GetFlag(FLAGS_documents));
  return found->second;
}

Settings read_settings(const Tokenizer& tokenizer) {
  const auto ids = [&](const std::string& token) {
    return token.empty() ? std::vector<int64_t>() : std::vector<int64_t>{tokenizer.id(token)};
  };
  return {ids(absl::GetFlag(FLAGS_begin)), ids(absl::GetFlag(FLAGS_end)), absl::GetFlag(FLAGS_special_tokens)};
}

void read_chunk(DocumentReader& reader, Chunk& chunk) {
  chunk = {};
  for (size_t bytes = 0; bytes < kBytesAtOnce; bytes += chunk.documents.back().text.size()) {
    auto document = reader.next();
    if (!document) return;
    chunk.documents.push_back(std::move(*document));
  }
}

constinit tessera::internal::PerThread<WordCache> cache_of_words;

void tokenize_chunk(const Tokenizer& tokenizer, const Settings& settings, Chunk& chunk) {
  for (const auto& [text, place] : chunk.documents) {
    try {
      auto ids = tokenizer.encode(text, settings.adds_special_tokens, *cache_of_words);
      ids.insert(ids.begin(), settings.begin.begin(), settings.begin.end());
      ids.insert(ids.end(), settings.end.begin(), settings.end.end());
      chunk.tokens.push_back(std::move(ids));
    } catch (const std::exception& error) {
      TORCH_CHECK(false, place, ": ", tessera::internal::error_text(error));
    }
  }
}

int64_t threads() {
  const auto asked = absl::GetFlag(FLAGS_threads);
  TORCH_CHECK_VALUE(asked >= 0, "--threads is ", asked);
  return asked > 0 ? asked : std::max<int64_t>(1, std::thread::hardware_concurrency());
}

void tokenize_files(const std::vector<std::string>& files) {
  const Tokenizer tokenizer(absl::GetFlag(FLAGS_tokenizer));
  const auto settings = read_settings(tokenizer);
  DocumentReader reader(files, documents_by(), absl::GetFlag(FLAGS_field));
  const auto path = absl::GetFlag(FLAGS_o);
  tessera::TokenFileWriter writer(path, tokenizer.vocabulary());
  std::vector<Chunk> chunks(static_cast<size_t>(kChunksAhead * threads()));
  const auto ahead =
      tessera::internal::start_read_ahead(std::ssize(chunks), threads(), [&](size_t slot) -> std::function<void()> {
        auto& chunk = chunks[slot];
        read_chunk(reader, chunk);
        return [&] { tokenize_chunk(tokenizer, settings, chunk); };
      });
  for (;;) {
    const auto& chunk = chunks[tessera::internal::wait_for_slot(*ahead)];
    if (chunk.documents.empty()) break;
    for (const auto& tokens : chunk.tokens) writer.add(tokens);
    tessera::internal::release_slot(*ahead);
  }
  TORCH_CHECK_VALUE(writer.tokens() > 0, "the files hold no text");
  writer.finish();
  fmt::print("{}: {} documents, {} tokens, ids below {}\n", path, writer.documents(), writer.tokens(), tokenizer.vocabulary());
}

} // namespace

} // namespace tokenize

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(tokenize::kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return file.find("tessera_tokenize") != absl::string_view::npos; };
  absl::SetFlagsUsageConfig(usage);
  auto arguments = absl::ParseCommandLine(argc, argv);
  try {
    const std::vector<std::string> files(arguments.begin() + 1, arguments.end());
    TORCH_CHECK_VALUE(!absl::GetFlag(FLAGS_tokenizer).empty() && !absl::GetFlag(FLAGS_o).empty() && !files.empty(),
                      "give --tokenizer, -o and files with text (see --help)");
    tokenize::tokenize_files(files);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", tessera::internal::error_text(error));
    return 1;
  }
}
