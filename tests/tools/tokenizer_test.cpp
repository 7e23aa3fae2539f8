// The parts of a tokenizer.json one by one; tessera_tokenize_test.py compares whole ones with Hugging Face's library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <tokenize/tokenizer.h>

#include <nlohmann/json.hpp>

#include <tokenize/pattern.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tokenize::tokenizer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Ids = std::vector<int64_t>;
using Json = nlohmann::json;
using Pieces = std::vector<std::string>;
using tessera::internal::JsonView;

const std::string kWhere = "tokenizer.json: pattern";

std::string normalized(const Json& json, const std::string& text) { return read_normalizer(JsonView(json, kWhere))(text); }
Pieces pre_tokenized(const Json& json, const std::string& text) { return read_pre_tokenizer(JsonView(json, kWhere))({text}); }
Pieces regex_split(const std::string& expression, const std::string& text, SplitBehavior behavior = SplitBehavior::kIsolated) {
  return split(text, regex_pattern(expression, kWhere)(text), behavior);
}

TEST(Split, TreatsMatchesAsItsBehaviorSays) {
  const std::string text = "a--b-c";
  EXPECT_EQ(regex_split("-", text, SplitBehavior::kRemoved), (Pieces{"a", "b", "c"}));
  EXPECT_EQ(regex_split("-", text, SplitBehavior::kIsolated), (Pieces{"a", "-", "-", "b", "-", "c"}));
  EXPECT_EQ(regex_split("-", text, SplitBehavior::kMergedWithPrevious), (Pieces{"a-", "-", "b-", "c"}));
  EXPECT_EQ(regex_split("-", text, SplitBehavior::kMergedWithNext), (Pieces{"a", "-", "-b", "-c"}));
  EXPECT_EQ(regex_split("-", text, SplitBehavior::kContiguous), (Pieces{"a", "--", "b", "-", "c"}));
  EXPECT_THAT(regex_split("-", ""), IsEmpty());
  EXPECT_THAT(regex_split("x*", "abxc"), ElementsAre("a", "b", "x", "c")); // empty matches cut as others do
}

TEST(Regex, HasOnigurumasClasses) {
  EXPECT_EQ(regex_split(R"(\s+)", "a\x0b\u0085\u00a0b", SplitBehavior::kRemoved), (Pieces{"a", "b"}));
  EXPECT_EQ(regex_split(R"([^\s]+)", "a \U0001f600\u3000中"), (Pieces{"a", " ", "\U0001f600", "\u3000", "中"}));
  EXPECT_EQ(regex_split(R"(\W)", "a_1\u00b2-b"), (Pieces{"a_1\u00b2", "-", "b"}));
  EXPECT_EQ(regex_split(R"(^b$)", "a\nb\nc"), (Pieces{"a\n", "b", "\nc"})); // each line begins and ends
  EXPECT_EQ(regex_split(R"((?i:'s))", "it'\u017f"), (Pieces{"it", "'\u017f"}));
  EXPECT_EQ(regex_split(R"(\p{N}{1,3})", "12345"), (Pieces{"123", "45"}));
}

TEST(Regex, NamesWhatMeansSomethingElse) {
  for (const auto* expression : {R"(\ba)", R"(\h)", R"((a)\1)", "[[:alpha:]]", "a{1,2}+", "(?m:.)", "(?<name>a)"}) {
    EXPECT_THROWS_WITH(regex_pattern(expression, kWhere), kWhere + ": tessera-tokenize does not support");
    EXPECT_THROWS_WITH(regex_pattern(expression, kWhere), std::string("in the regular expression ") + expression);
  }
  EXPECT_THROWS_WITH(regex_pattern("(a", kWhere), kWhere + ": ICU cannot compile the regular expression (a");
  EXPECT_THROWS_WITH(regex_pattern("a\\", kWhere), "a backslash at the end");
}

TEST(Normalizers, RewriteText) {
  EXPECT_EQ(normalized(nullptr, "e\u0301"), "e\u0301");
  EXPECT_EQ(normalized({{"type", "NFC"}}, "e\u0301"), "\u00e9");
  EXPECT_EQ(normalized({{"type", "NFKC"}}, "\ufb01"), "fi");
  EXPECT_EQ(normalized({{"type", "Lowercase"}}, "ÅΣ\u0130"), "åσi\u0307");
  EXPECT_EQ(normalized({{"type", "Sequence"}, {"normalizers", {{{"type", "NFD"}}, {{"type", "StripAccents"}}}}}, "Žižek"),
            "Zizek");
  const Json cased{{"type", "BertNormalizer"}, {"lowercase", false}};
  EXPECT_EQ(normalized(cased, "É\tx\u200d中"), "É x 中 ");
  EXPECT_EQ(normalized({{"type", "BertNormalizer"}, {"strip_accents", nullptr}}, "É"), "e");
}

TEST(PreTokenizers, SplitText) {
  EXPECT_EQ(pre_tokenized({{"type", "ByteLevel"}, {"add_prefix_space", false}}, "I'll go  é"),
            (Pieces{"I", "'ll", "Ġgo", "Ġ", "ĠÃ©"}));
  EXPECT_EQ(pre_tokenized({{"type", "ByteLevel"}, {"use_regex", false}}, "a b"), (Pieces{"ĠaĠb"}));
  EXPECT_EQ(pre_tokenized({{"type", "BertPreTokenizer"}}, "a-b $c\u2026"), (Pieces{"a", "-", "b", "$", "c", "\u2026"}));
  EXPECT_EQ(pre_tokenized({{"type", "Digits"}, {"individual_digits", true}}, "a12"), (Pieces{"a", "1", "2"}));
  EXPECT_EQ(pre_tokenized({{"type", "Digits"}}, "a12"), (Pieces{"a", "12"}));
  const Json letters{{"type", "Split"}, {"pattern", {{"Regex", "\\p{L}+"}}}, {"behavior", "Removed"}, {"invert", true}};
  EXPECT_EQ(pre_tokenized(letters, "ab, cd"), (Pieces{"ab", "cd"}));
  const Json text{{"type", "Split"}, {"pattern", {{"String", "."}}}, {"behavior", "MergedWithPrevious"}};
  EXPECT_EQ(pre_tokenized(text, "a.b."), (Pieces{"a.", "b."}));
  EXPECT_THROWS_WITH(pre_tokenized({{"type", "Split"}, {"pattern", {{"String", "."}}}, {"behavior", "Other"}}, ""),
                     "the behavior Other");
}

TEST(AddedTokens, AreFoundFromLeftToRightTheLongestFirst) {
  AddedTokens tokens;
  tokens.add({"<s>", 1});
  tokens.add({"<s><s>", 2});
  tokens.add({"new", 3, /*is_single_word=*/true});
  tokens.add({"[MASK]", 4, false, /*strips_left=*/true, /*strips_right=*/true});
  const auto found = [&](std::string_view text) {
    std::string result;
    for (const auto& [plain, id] : tokens.split(text)) result += '|' + (id ? std::to_string(*id) : std::string(plain));
    return result;
  };
  EXPECT_EQ(found("a<s><s><s>b"), "|a|2|1|b");
  EXPECT_EQ(found("new, renew new_ (new)"), "|3|, renew new_ (|3|)");
  EXPECT_EQ(found("a \u3000[MASK] [MASK]\n b"), "|a|4|4|b");
  EXPECT_EQ(found(""), "");
}

class TokenizerTest : public ::testing::Test {
 protected:
  /// Byte-pair encoding in which "ab" is merged before "bc".
  static Json bpe() {
    return {{"model",
             {{"type", "BPE"},
              {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}, {"abc", 5}, {"?", 6}, {"<s>", 7}}},
              {"merges", {"a b", "b c", "ab c"}},
              {"unk_token", "?"}}},
            {"added_tokens", Json::array({{{"content", "<s>"}, {"id", 7}}, {{"content", "new"}, {"id", 9}}})}};
  }
  static Json word_piece() {
    return {{"model",
             {{"type", "WordPiece"},
              {"vocab", {{"[UNK]", 0}, {"un", 1}, {"##aff", 2}, {"##able", 3}, {"affable", 4}, {"字", 5}}},
              {"max_input_chars_per_word", 12}}},
            {"pre_tokenizer", {{"type", "WhitespaceSplit"}}}};
  }
  Tokenizer load(const Json& json) const { return Tokenizer(folder_.write("tokenizer.json", json.dump())); }
  Ids encode(const Json& json, const std::string& text, bool adds_special_tokens = true) const {
    WordCache cache;
    const auto tokenizer = load(json);
    const auto ids = tokenizer.encode(text, adds_special_tokens, cache);
    EXPECT_EQ(tokenizer.encode(text, adds_special_tokens, cache), ids); // from the cache
    return ids;
  }

  tessera::testing::TemporaryFolder folder_;
};

TEST_F(TokenizerTest, MergesPairsInTheirOrder) {
  EXPECT_EQ(encode(bpe(), "abc"), Ids{5});
  EXPECT_EQ(encode(bpe(), "bcab"), (Ids{4, 3}));
  EXPECT_EQ(encode(bpe(), "aabbcc"), (Ids{0, 3, 4, 2}));
  EXPECT_EQ(encode(bpe(), "axyb"), (Ids{0, 6, 6, 1}));
  auto fused = bpe();
  fused["model"]["fuse_unk"] = true;
  EXPECT_EQ(encode(fused, "axyb"), (Ids{0, 6, 1}));
  auto arrays = bpe();
  arrays["model"]["merges"] = Json::parse(R"([["b", "c"], ["a", "b"]])");
  EXPECT_EQ(encode(arrays, "abc"), (Ids{0, 4}));
  arrays["model"]["ignore_merges"] = true;
  EXPECT_EQ(encode(arrays, "abc"), Ids{5});
}

TEST_F(TokenizerTest, FindsAddedTokensFirst) {
  EXPECT_EQ(encode(bpe(), "<s>ab<s>newc"), (Ids{7, 3, 7, 9, 2}));
  EXPECT_EQ(load(bpe()).vocabulary(), 10);
  EXPECT_EQ(load(bpe()).id("new"), 9);
  EXPECT_EQ(load(bpe()).id("ab"), 3);
  EXPECT_THROWS_WITH(load(bpe()).id("old"), "tokenizer.json has no token old");
}

TEST_F(TokenizerTest, TakesTheLongestPiecesOfWords) {
  EXPECT_EQ(encode(word_piece(), "unaffable affable 字"), (Ids{1, 2, 3, 4, 5}));
  EXPECT_EQ(encode(word_piece(), "unaffables un"), (Ids{0, 1})); // unknown as a whole
  EXPECT_EQ(encode(word_piece(), "unaffableable"), Ids{0});      // longer than a word may be
}

TEST_F(TokenizerTest, FramesATextAsThePostProcessorSays) {
  auto json = bpe();
  json["post_processor"] = Json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
      {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
       "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}},
      {"type": "BertProcessing", "sep": ["c", 2], "cls": ["a", 0]}]})");
  EXPECT_EQ(encode(json, "b"), (Ids{0, 7, 1, 2}));
  EXPECT_EQ(encode(json, "b", /*adds_special_tokens=*/false), Ids{1});
  EXPECT_EQ(encode(json, ""), (Ids{0, 7, 2}));
}

TEST_F(TokenizerTest, NamesWhatIsWrong) {
  EXPECT_THROWS_WITH(encode(bpe(), "ab\xff"), "not UTF-8 at byte 2 of the document");
  EXPECT_THROWS_WITH(encode(bpe(), "a\xed\xa0\x80"), "not UTF-8 at byte 1"); // a surrogate
  auto json = bpe();
  json["model"]["merges"] = {"a"};
  EXPECT_THROWS_WITH(load(json), "tokenizer.json.model.merges[0] a merge has two parts");
  json["model"]["merges"] = {"a x"};
  EXPECT_THROWS_WITH(load(json), "the vocabulary lacks the token ax");
  json = word_piece();
  json["model"]["unk_token"] = "[X]";
  EXPECT_THROWS_WITH(load(json), "the vocabulary lacks the token [X] for unknown words");
  json["model"]["vocab"] = Json::object();
  EXPECT_THROWS_WITH(load(json), "the vocabulary is empty");
  json.erase("model");
  EXPECT_THROWS_WITH(load(json), "lacks the field \"model\"");
  EXPECT_THROWS_WITH(Tokenizer(folder_.file("none.json")), "none.json: No such file");
}

} // namespace
} // namespace tokenize::tokenizer_test
