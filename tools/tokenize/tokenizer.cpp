#include "tokenizer.h"

#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/file.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "characters.h"

namespace tokenize {

namespace {

using tessera::internal::JsonView;

constexpr int64_t kLargestFile = int64_t{1} << 30;
constexpr size_t kMostCachedWords = size_t{1} << 18, kLongestCachedWord = 64;

const tessera::internal::Json& null_json() {
  static const tessera::internal::Json kNull;
  return kNull;
}

/// A key's value; null where it is missing.
JsonView optional_part(const JsonView& json, const std::string& key) {
  return json.has(key) ? json[key] : JsonView(null_json(), json.where() + ": " + key);
}

void check_text(std::string_view text) {
  constexpr size_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(text.size() < kMost, "a document of ", text.size(), " bytes is too long: divide it");
  const auto malformed = find_malformed(text);
  TORCH_CHECK_VALUE(malformed < 0, "not UTF-8 at byte ", malformed, " of the document");
}

} // namespace

const std::vector<int64_t>* WordCache::find(std::string_view word) const {
  const auto found = words_.find(absl::string_view(word.data(), word.size()));
  return found == words_.end() ? nullptr : &found->second;
}

void WordCache::keep(std::string_view word, std::vector<int64_t> ids) {
  if (words_.size() < kMostCachedWords && word.size() <= kLongestCachedWord) words_.emplace(word, std::move(ids));
}

Tokenizer::Tokenizer(const std::string& path) : path_(path) {
  const auto json = tessera::internal::parse_json(tessera::internal::read_file(path, kLargestFile), path);
  const JsonView view(json, path);
  normalize_ = read_normalizer(optional_part(view, "normalizer"));
  pre_tokenize_ = read_pre_tokenizer(optional_part(view, "pre_tokenizer"));
  model_ = read_model(view["model"]);
  frame_ = read_post_processor(optional_part(view, "post_processor"));
  for (const auto& [token, id] : model_->vocabulary()) vocabulary_ = std::max(vocabulary_, id + 1);
  if (view.has("added_tokens")) read_added_tokens(view["added_tokens"]);
  for (const auto* ids : {&frame_.before, &frame_.after}) {
    for (const auto id : *ids) vocabulary_ = std::max(vocabulary_, id + 1);
  }
}

void Tokenizer::read_added_tokens(const JsonView& json) {
  const auto flag = [](const JsonView& token, const char* key) { return token.has(key) && token[key].boolean(); };
  for (const auto& each : json.elements()) {
    AddedToken token{each["content"].string(), each["id"].non_negative(), flag(each, "single_word"), flag(each, "lstrip"),
                     flag(each, "rstrip")};
    const auto& known = model_->vocabulary();
    if (const auto found = known.find(token.content); found != known.end()) token.id = found->second;
    vocabulary_ = std::max(vocabulary_, token.id + 1);
    added_ids_[token.content] = token.id;
    if (flag(each, "normalized")) {
      token.content = normalize_(token.content);
      normalized_tokens_.add(std::move(token));
    } else {
      raw_tokens_.add(std::move(token));
    }
  }
}

int64_t Tokenizer::id(const std::string& token) const {
  if (const auto found = added_ids_.find(token); found != added_ids_.end()) return found->second;
  const auto found = model_->vocabulary().find(token);
  TORCH_CHECK_VALUE(found != model_->vocabulary().end(), path_, " has no token ", token);
  return found->second;
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, bool adds_special_tokens, WordCache& cache) const {
  check_text(text);
  std::vector<int64_t> ids;
  if (adds_special_tokens) ids = frame_.before;
  for (const auto& [raw, raw_id] : raw_tokens_.split(text)) {
    if (raw_id) {
      ids.push_back(*raw_id);
      continue;
    }
    const auto normalized = normalize_(std::string(raw));
    for (const auto& [plain, id] : normalized_tokens_.split(normalized)) {
      id ? ids.push_back(*id) : append_plain(plain, ids, cache);
    }
  }
  if (adds_special_tokens) ids.insert(ids.end(), frame_.after.begin(), frame_.after.end());
  return ids;
}

void Tokenizer::append_plain(std::string_view text, std::vector<int64_t>& ids, WordCache& cache) const {
  std::vector<int64_t> of_word;
  for (const auto& word : pre_tokenize_({std::string(text)})) {
    if (const auto* known = cache.find(word)) {
      ids.insert(ids.end(), known->begin(), known->end());
      continue;
    }
    of_word.clear();
    model_->append(word, of_word);
    ids.insert(ids.end(), of_word.begin(), of_word.end());
    cache.keep(word, of_word);
  }
}

} // namespace tokenize
