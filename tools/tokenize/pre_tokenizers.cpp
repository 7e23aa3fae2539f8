#include "pre_tokenizers.h"

#include <unicode/uchar.h>

#include <array>
#include <iterator>
#include <map>
#include <utility>

#include "characters.h"
#include "part.h"
#include "pattern.h"

namespace tokenize {

namespace {

// GPT-2's (openai/gpt-2, src/encoder.py).
constexpr const char* kGpt2Words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

PreTokenizer splitter(Pattern pattern, SplitBehavior behavior) {
  return [pattern = std::move(pattern), behavior](const std::vector<std::string>& pieces) {
    std::vector<std::string> parts;
    for (const auto& piece : pieces) {
      auto of_piece = split(piece, pattern(piece), behavior);
      parts.insert(parts.end(), std::make_move_iterator(of_piece.begin()), std::make_move_iterator(of_piece.end()));
    }
    return parts;
  };
}

PreTokenizer splits_in_turn(std::vector<PreTokenizer> steps) {
  return [steps = std::move(steps)](std::vector<std::string> pieces) {
    for (const auto& step : steps) pieces = step(std::move(pieces));
    return pieces;
  };
}

SplitBehavior read_behavior(const Part& part) {
  static const std::map<std::string, SplitBehavior> kBehaviors{{"Removed", SplitBehavior::kRemoved},
                                                               {"Isolated", SplitBehavior::kIsolated},
                                                               {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
                                                               {"MergedWithNext", SplitBehavior::kMergedWithNext},
                                                               {"Contiguous", SplitBehavior::kContiguous}};
  const auto name = part.string("behavior", "Isolated");
  const auto found = kBehaviors.find(name);
  if (found == kBehaviors.end()) part.refuse("the behavior " + name);
  return found->second;
}

/// The printable character that stands for each byte in a byte-level vocabulary: itself where it is one in Latin-1, otherwise
/// one of those from U+0100 on, in turn.
const std::array<std::string, 256>& byte_characters() {
  static const auto kCharacters = [] {
    std::array<std::string, 256> characters;
    Character next = 256;
    for (Character byte = 0; byte < 256; ++byte) {
      const bool is_printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      append(characters[static_cast<size_t>(byte)], is_printable ? byte : next++);
    }
    return characters;
  }();
  return kCharacters;
}

PreTokenizer byte_level(const Part& part) {
  part.allow({"add_prefix_space", "trim_offsets", "use_regex"});
  const bool adds_space = part.boolean("add_prefix_space", true);
  std::vector<PreTokenizer> steps;
  if (adds_space) {
    steps.emplace_back([](std::vector<std::string> pieces) {
      for (auto& piece : pieces) {
        if (!piece.starts_with(' ')) piece.insert(0, 1, ' ');
      }
      return pieces;
    });
  }
  if (part.boolean("use_regex", true)) {
    steps.push_back(splitter(regex_pattern(kGpt2Words, part.json().where()), SplitBehavior::kIsolated));
  }
  steps.emplace_back([](std::vector<std::string> pieces) {
    for (auto& piece : pieces) {
      std::string characters;
      for (const char byte : piece) characters += byte_characters()[static_cast<uint8_t>(byte)];
      piece = std::move(characters);
    }
    return pieces;
  });
  return splits_in_turn(std::move(steps));
}

PreTokenizer split_by(const Part& part) {
  part.allow({"pattern", "behavior", "invert"});
  const auto json = part.json()["pattern"];
  if (!json.has("Regex") && !json.has("String")) part.refuse("a pattern that is neither a String nor a Regex");
  auto pattern = json.has("Regex") ? regex_pattern(json["Regex"].string(), json.where()) : text_pattern(json["String"].string());
  if (!part.boolean("invert", false)) return splitter(std::move(pattern), read_behavior(part));
  const auto inverted = [pattern = std::move(pattern)](std::string_view text) {
    auto stretches = pattern(text);
    for (auto& each : stretches) each.is_match = !each.is_match;
    return stretches;
  };
  return splitter(inverted, read_behavior(part));
}

bool is_digit(Character c) { return (U_GET_GC_MASK(c) & U_GC_N_MASK) != 0; } // Rust's char::is_numeric

PreTokenizer pre_tokenizer_sequence(const Part& part) {
  part.allow({"pretokenizers"});
  std::vector<PreTokenizer> steps;
  for (const auto& each : part.json()["pretokenizers"].elements()) steps.push_back(read_pre_tokenizer(each));
  return splits_in_turn(std::move(steps));
}

} // namespace

PreTokenizer read_pre_tokenizer(const tessera::internal::JsonView& json) {
  if (json.json().is_null()) return splits_in_turn({});
  const Part part(json);
  const auto& type = part.type();
  if (type == "Sequence") return pre_tokenizer_sequence(part);
  if (type == "ByteLevel") return byte_level(part);
  if (type == "Split") return split_by(part);
  if (type == "Digits") {
    part.allow({"individual_digits"});
    const auto behavior = part.boolean("individual_digits", false) ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
    return splitter(character_pattern(is_digit), behavior);
  }
  if (type == "Punctuation") {
    part.allow({"behavior"});
    return splitter(character_pattern(is_bert_punctuation), read_behavior(part));
  }
  if (type != "WhitespaceSplit" && type != "BertPreTokenizer") part.refuse("the pre-tokenizer " + type);
  part.allow({});
  auto at_spaces = splitter(character_pattern(is_space), SplitBehavior::kRemoved);
  if (type == "WhitespaceSplit") return at_spaces;
  return splits_in_turn({at_spaces, splitter(character_pattern(is_bert_punctuation), SplitBehavior::kIsolated)});
}

} // namespace tokenize
