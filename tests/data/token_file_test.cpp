// Files of tokens: what is written is read, and what is wrong with a file is named.
#include <tessera/data/token_file.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <vector>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::token_file_test {
namespace {

using Tokens = std::vector<int64_t>;

std::vector<Tokens> draw_documents(Draw& draw, int64_t vocabulary) {
  std::vector<Tokens> documents(static_cast<size_t>(1 + draw.below(30)));
  for (auto& document : documents) {
    document.resize(static_cast<size_t>(draw.chance(20) ? 0 : draw.below(200)));
    for (auto& token : document) token = draw.chance(10) ? vocabulary - 1 : draw.below(vocabulary);
  }
  documents[static_cast<size_t>(draw.below(std::ssize(documents)))].push_back(vocabulary - 1); // not empty as a whole
  return documents;
}

std::string write_tokens(const TemporaryFolder& folder, const std::vector<Tokens>& documents, int64_t vocabulary,
                         const std::string& name = "tokens.bin") {
  TokenFileWriter writer(folder.file(name), vocabulary);
  for (const auto& document : documents) writer.add(document);
  writer.finish();
  return folder.file(name);
}

Tokens read_tokens(const TokenFile& file, int64_t begin, int64_t end) {
  Tokens tokens(static_cast<size_t>(end - begin));
  file.read(begin, tokens);
  return tokens;
}

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST(TokenFile, ReadsWhatWasWritten) {
  const TemporaryFolder folder;
  Draw draw(test_seed());
  for (const int64_t vocabulary : {2, 256, 50257, 65536, 65537, 128256, int{1} << 30}) {
    const auto documents = draw_documents(draw, vocabulary);
    const TokenFile file(write_tokens(folder, documents, vocabulary));
    EXPECT_EQ(file.type(), vocabulary <= 65536 ? TokenType::kUInt16 : TokenType::kUInt32);
    EXPECT_EQ(file.vocabulary(), vocabulary);
    ASSERT_EQ(file.documents(), std::ssize(documents));
    int64_t at = 0;
    for (int64_t i = 0; i < file.documents(); ++i) {
      const auto& document = documents[static_cast<size_t>(i)];
      const auto [begin, end] = file.document(i);
      ASSERT_EQ(begin, at);
      ASSERT_EQ(read_tokens(file, begin, end), document);
      for (auto token = begin; token < end; ++token) ASSERT_EQ(file.document_of(token), i);
      at = end;
    }
    EXPECT_EQ(file.tokens(), at);
    file.verify();
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1); // nothing partial is left
}

TEST(TokenFile, KnowsFilesOfLlmC) {
  const TemporaryFolder folder;
  std::vector<int32_t> header(256);
  header[0] = 20240520, header[1] = 1, header[2] = 5;
  const auto gpt2 = folder.write("gpt2.bin", bytes_of(header) + bytes_of(std::vector<uint16_t>{50256, 7, 8, 50256, 65535}));
  const TokenFile file(gpt2);
  EXPECT_EQ(file.type(), TokenType::kUInt16);
  EXPECT_EQ(read_tokens(file, 0, 5), (Tokens{50256, 7, 8, 50256, 65535}));
  EXPECT_EQ(file.documents(), 1);
  EXPECT_EQ(file.vocabulary(), 0);
  const TokenFile divided(gpt2, {.separator = DocumentSeparator{50256, DocumentSeparator::Place::kBegins}});
  ASSERT_EQ(divided.documents(), 2);
  EXPECT_EQ(divided.document(0), (std::pair<int64_t, int64_t>{0, 3}));
  header[0] = 20240801, header[1] = 7, header[2] = 2;
  const TokenFile llama(folder.write("llama3.bin", bytes_of(header) + bytes_of(std::vector<uint32_t>{128000, 5})));
  EXPECT_EQ(llama.type(), TokenType::kUInt32);
  EXPECT_EQ(read_tokens(llama, 0, 2), (Tokens{128000, 5}));
  header[1] = 3;
  EXPECT_THROWS_WITH(TokenFile(folder.write("other.bin", bytes_of(header))), "the magic 20240801 of llm.c with version 3");
  header[0] = 20240520, header[1] = 1, header[2] = 5;
  EXPECT_THROWS_WITH(TokenFile(folder.write("short.bin", bytes_of(header) + "abc")),
                     "short.bin is torn: its header says 5 tokens");
}

TEST(TokenFile, ReadsFilesWithoutAHeaderWhereItIsTold) {
  const TemporaryFolder folder;
  const auto path = folder.write("train.bin", bytes_of(std::vector<uint16_t>{5, 6, 9, 9, 7, 8}));
  EXPECT_THROWS_WITH(TokenFile{path}, "for one without a header set TokenFileOptions::headerless");
  const TokenFile file(path, {.headerless = TokenType::kUInt16, .separator = DocumentSeparator{9}, .vocabulary = 10});
  EXPECT_EQ(read_tokens(file, 0, 6), (Tokens{5, 6, 9, 9, 7, 8}));
  std::vector<std::pair<int64_t, int64_t>> documents;
  for (int64_t i = 0; i < file.documents(); ++i) documents.push_back(file.document(i));
  EXPECT_EQ(documents, (std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 4}, {4, 6}}));
  EXPECT_THROWS_WITH(TokenFile(folder.write("odd.bin", "abc"), {.headerless = TokenType::kUInt16}),
                     "odd.bin is torn: its 3 bytes are no whole number of tokens of 2 bytes");
}

TEST(TokenFile, NamesWhatIsWrongWithAFile) {
  const TemporaryFolder folder;
  EXPECT_THROWS_WITH(TokenFile(folder.file("none.bin")), "cannot open " + folder.file("none.bin") + ": No such file");
  EXPECT_THROWS_WITH(TokenFile(folder.path().string()), "not a regular file");
  EXPECT_THROWS_WITH(TokenFile(folder.write("empty.bin", "")), "it is empty");
  EXPECT_THROWS_WITH(TokenFile(folder.write("text.bin", "It is a truth universally acknowledged")),
                     "text.bin is no file of tokens");
  EXPECT_THROWS_WITH(TokenFile(folder.write("begun.bin", "TSRTOKEN")), "begun.bin is torn: its 8 bytes are less than a header");
}

/// Each byte of a file wrong, and each length: an error, or the same tokens (the zeros before the table are nobody's).
TEST(TokenFile, FindsTornAndDamagedFiles) {
  const TemporaryFolder folder;
  const std::vector<Tokens> documents{{1, 2, 3}, {}, {4, 5}};
  const auto whole = read_text(write_tokens(folder, documents, 70000));
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto path = folder.write("cut.bin", whole.substr(0, length));
    EXPECT_THROWS_WITH(TokenFile{path}, "cut.bin");
  }
  EXPECT_THROWS_WITH(TokenFile(folder.write("long.bin", whole + 'x')), "long.bin is torn");
  const size_t tokens_end = 64 + 5 * 4;
  for (size_t i = 0; i < whole.size(); ++i) {
    if (i >= 64 && i < tokens_end + 4) continue; // tokens, and the zeros behind them
    auto damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    const auto path = folder.write("damaged.bin", damaged);
    EXPECT_THROWS_WITH(TokenFile{path}, "damaged.bin");
  }
}

TEST(TokenFile, FindsIdsThatAreNotInTheVocabulary) {
  const TemporaryFolder folder;
  auto bytes = read_text(write_tokens(folder, {{1, 2, 3, 4}}, 10));
  bytes[64 + 4] = 10; // the third token
  const TokenFile file(folder.write("wrong.bin", bytes));
  EXPECT_EQ(read_tokens(file, 0, 2), (Tokens{1, 2}));
  const std::string error = "wrong.bin: token 2 is 10, which is not in the vocabulary of 10 ids";
  EXPECT_THROWS_WITH(read_tokens(file, 1, 4), error);
  EXPECT_THROWS_WITH(file.verify(), error);
  EXPECT_THROWS_WITH(read_tokens(file, 3, 5), "tokens 3 to 5 of 4");
  EXPECT_THROWS_WITH(read_tokens(file, -1, 2), "tokens -1 to 2 of 4");
  EXPECT_THROWS_WITH(file.document(1), "document 1 of 1");
  EXPECT_THROWS_WITH(file.document_of(4), "token 4 of 4");
  const TokenFile smaller(folder.file("tokens.bin"), {.vocabulary = 4});
  EXPECT_THROWS_WITH(smaller.verify(), "token 3 is 4, which is not in the vocabulary of 4 ids");
  EXPECT_THROWS_WITH(TokenFile(folder.file("tokens.bin"), {.separator = DocumentSeparator{1}}), "the file names its documents");
}

TEST(TokenFile, NoticesThatAFileChanges) {
  const TemporaryFolder folder;
  const auto path = write_tokens(folder, {Tokens(10000, 3)}, 10);
  const TokenFile file(path);
  EXPECT_EQ(read_tokens(file, 9000, 9001), Tokens{3});
  std::filesystem::resize_file(path, 100);
  EXPECT_THROWS_WITH(read_tokens(file, 9000, 9001), path + " has changed since it was opened: it had");
  const auto rewritten = write_tokens(folder, {Tokens(10000, 3)}, 10, "rewritten.bin");
  const TokenFile other(rewritten);
  const timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
  ASSERT_EQ(::utimensat(AT_FDCWD, rewritten.c_str(), times, 0), 0); // a write in the same clock tick would have the same time
  EXPECT_THROWS_WITH(other.verify(), rewritten + " has changed since it was opened: something has written to it");
  const TokenFile replaced(write_tokens(folder, {{1, 2}}, 10));
  write_tokens(folder, {{7, 8, 9}}, 10); // in its place: who has opened the old one keeps it
  EXPECT_EQ(read_tokens(replaced, 0, 2), (Tokens{1, 2}));
}

TEST(TokenFileWriter, LeavesAWholeFileOrNone) {
  const TemporaryFolder folder;
  const auto path = write_tokens(folder, {{1, 2}}, 10);
  {
    TokenFileWriter writer(path, 10);
    writer.add(Tokens(3000000, 4)); // more than is kept in memory
    EXPECT_THROWS_WITH(writer.add(Tokens{3, 10}),
                       "document 1 of " + path + " has the id 10, which is not in the vocabulary of 10 ids");
    EXPECT_THROWS_WITH(writer.add(Tokens{-1}), "has the id -1");
    EXPECT_EQ(writer.tokens(), 3000000);
    EXPECT_EQ(writer.documents(), 1);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
  EXPECT_EQ(TokenFile(path).tokens(), 2);
  TokenFileWriter empty(path, 10);
  empty.add({});
  EXPECT_THROWS_WITH(empty.finish(), path + " would have no tokens");
  EXPECT_THROWS_WITH(TokenFileWriter(path, 0), "a vocabulary of 0 ids");
  EXPECT_THROWS_WITH(TokenFileWriter(folder.file("no/such/folder.bin"), 10), "No such file or directory");
  TokenFileWriter finished(path, 10);
  finished.add(Tokens{5});
  finished.finish();
  EXPECT_THROWS_WITH(finished.add(Tokens{5}), "is finished");
  EXPECT_EQ(read_tokens(TokenFile(path), 0, 1), Tokens{5});
}

} // namespace
} // namespace tessera::testing::token_file_test
