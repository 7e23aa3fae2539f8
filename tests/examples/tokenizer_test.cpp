#include <embed_minilm/tokenizer.h>
#include <embed_minilm/words.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "../support/matchers.h"
#include "../support/temporary_folder.h"

namespace minilm::tokenizer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Ids = std::vector<int64_t>;

// Line n is id n.
constexpr const char* kVocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nun\n##aff\n##able\n##a\naffable\n,\na\n字\nun\xc3\xb8\n";

class TokenizerTest : public ::testing::Test {
 protected:
  std::string vocabulary(const std::string& content) const { return folder_.write("vocab.txt", content); }
  Ids encode(const std::string& text, size_t longest = 256) const {
    return Tokenizer(vocabulary(kVocabulary)).encode(text, longest);
  }

  tessera::testing::TemporaryFolder folder_;
};

TEST(Words, SplitsAtSpaceAndAroundPunctuation) {
  EXPECT_THAT(words_of("  Hello,\tWORLD!\n(a-b) "), ElementsAre("hello", ",", "world", "!", "(", "a", "-", "b", ")"));
  EXPECT_THAT(words_of("1+1=$2"), ElementsAre("1", "+", "1", "=", "$", "2"));
  EXPECT_THAT(words_of("«a»\u3000b…"), ElementsAre("«", "a", "»", "b", "…"));
  EXPECT_THAT(words_of(""), IsEmpty());
  EXPECT_THAT(words_of(" \r\n\u00a0"), IsEmpty());
}

TEST(Words, RemovesAccentsAndControlCharacters) {
  EXPECT_THAT(words_of("CRÈME bru\u0302le\u0301e Žižek"), ElementsAre("creme", "brulee", "zizek"));
  EXPECT_THAT(words_of(std::string("a\0b\x01\x7f"
                                   "c\u200d\ufeff\ufffd"
                                   "d",
                                   16)),
              ElementsAre("abcd"));
  EXPECT_THAT(words_of("\u0301"), IsEmpty());
}

TEST(Words, CutsOutChineseCharactersOnly) {
  EXPECT_THAT(words_of("ab中文c"), ElementsAre("ab", "中", "文", "c"));
  EXPECT_THAT(words_of("ひらがな"), ElementsAre("ひらかな")); // the voicing mark is an accent in normal form D
}

TEST(Words, RefusesWhatIsNotUtf8) {
  EXPECT_THROWS_WITH(words_of("ab\xff"), "not UTF-8 at byte 2");
  EXPECT_THROWS_WITH(words_of("\xc3"), "not UTF-8 at byte 0");
  EXPECT_THROWS_WITH(words_of("a\xed\xa0\x80"), "not UTF-8 at byte 1"); // a surrogate
  EXPECT_THROWS_WITH(words_of("\xc0\x80"), "not UTF-8 at byte 0");      // not the shortest form
}

TEST_F(TokenizerTest, TakesTheLongestPieces) {
  EXPECT_EQ(encode("unaffable"), (Ids{2, 5, 6, 7, 3}));
  EXPECT_EQ(encode("Affable, a"), (Ids{2, 9, 10, 11, 3}));
  EXPECT_EQ(encode("unø"), (Ids{2, 13, 3}));
}

TEST_F(TokenizerTest, AWordThatCannotBePutTogetherIsUnknownAsAWhole) {
  EXPECT_EQ(encode("unaffableness"), (Ids{2, 1, 3}));
  EXPECT_EQ(encode("xa字a"), (Ids{2, 1, 12, 11, 3}));
  EXPECT_EQ(encode("a" + std::string(99, 'a')).size(), 102u);
  EXPECT_EQ(encode(std::string(101, 'a')), (Ids{2, 1, 3})); // longer than a word may be
}

TEST_F(TokenizerTest, NoWords) {
  EXPECT_EQ(encode(""), (Ids{2, 3}));
  EXPECT_EQ(encode("\t \n"), (Ids{2, 3}));
}

TEST_F(TokenizerTest, SpecialTokensInTheText) {
  EXPECT_EQ(encode("[SEP]a[MASK] [PAD]"), (Ids{2, 3, 11, 4, 0, 3}));
  EXPECT_EQ(encode("[sep]"), (Ids{2, 1, 1, 1, 3}));
}

TEST_F(TokenizerTest, CutsOffWhatIsTooLong) {
  EXPECT_EQ(encode("a a a a", 6), (Ids{2, 11, 11, 11, 11, 3}));
  EXPECT_EQ(encode("a a a a", 5), (Ids{2, 11, 11, 11, 3}));
  EXPECT_EQ(encode("a unaffable", 4), (Ids{2, 11, 5, 3}));
  EXPECT_EQ(encode("a a a a", 2), (Ids{2, 3}));
  EXPECT_THROWS_WITH(encode("a", 1), "a text of 1 word pieces has no room for [CLS] and [SEP]");
}

TEST_F(TokenizerTest, Vocabularies) {
  EXPECT_EQ(Tokenizer(vocabulary("[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\na\r\n")).encode("a", 9), (Ids{2, 5, 3}));
  EXPECT_THROWS_WITH(Tokenizer("/nowhere/vocab.txt"), "the vocabulary /nowhere/vocab.txt does not exist");
  EXPECT_THROWS_WITH(Tokenizer(vocabulary("[PAD]\n[UNK]\n[CLS]\n")), "vocab.txt has no [SEP]");
  EXPECT_THROWS_WITH(Tokenizer(vocabulary("")), "vocab.txt has no [PAD]");
  EXPECT_THROWS_WITH(Tokenizer(vocabulary("[PAD]\na\nb\na\n")), "vocab.txt has 'a' in line 2 and line 4");
}

// The ids of Hugging Face's `tokenizers`; fixtures/make_word_pieces.py wrote them.
TEST(Tokenizer, AgreesWithHuggingFace) {
  const std::string vocabulary = TESSERA_MINILM "/vocab.txt";
  if (!std::filesystem::exists(vocabulary)) GTEST_SKIP() << "there is no " << vocabulary << "; run scripts/setup --minilm";
  const Tokenizer tokenizer(vocabulary);
  std::ifstream file(TESSERA_FIXTURES "/word_pieces.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_GT(cases.size(), 400u);
  for (const auto& one : cases) {
    const auto text = one["text"].get<std::string>();
    EXPECT_EQ(tokenizer.encode(text, 256), one["ids"].get<Ids>()) << text;
  }
}

} // namespace
} // namespace minilm::tokenizer_test
