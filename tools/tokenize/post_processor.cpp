#include "post_processor.h"

#include <string>

#include "part.h"

namespace tokenize {

namespace {

Frame read_template(const Part& part) {
  part.allow({"single", "pair", "special_tokens"});
  Frame frame;
  bool is_after = false;
  for (const auto& piece : part.json()["single"].elements()) {
    if (piece.has("Sequence")) {
      if (is_after) part.refuse("a template that has the text twice");
      is_after = true;
      continue;
    }
    const auto& name = piece["SpecialToken"]["id"].string();
    const auto ids = part.json()["special_tokens"][name]["ids"].non_negatives();
    auto& side = is_after ? frame.after : frame.before;
    side.insert(side.end(), ids.begin(), ids.end());
  }
  if (!is_after) part.refuse("a template without the text");
  return frame;
}

/// Of BERT and RoBERTa: ["[SEP]", 102] and ["[CLS]", 101].
Frame read_pair(const Part& part) {
  part.allow({"sep", "cls", "trim_offsets", "add_prefix_space"});
  const auto id = [&](const char* key) {
    const auto pair = part.json()[key].elements();
    if (pair.size() != 2) part.json()[key].fail("a token and its id are expected");
    return pair[1].non_negative();
  };
  return {{id("cls")}, {id("sep")}};
}

/// Each step frames what the ones before have made.
Frame read_sequence(const Part& part) {
  part.allow({"processors"});
  Frame frame;
  for (const auto& each : part.json()["processors"].elements()) {
    const auto outer = read_post_processor(each);
    frame.before.insert(frame.before.begin(), outer.before.begin(), outer.before.end());
    frame.after.insert(frame.after.end(), outer.after.begin(), outer.after.end());
  }
  return frame;
}

} // namespace

Frame read_post_processor(const tessera::internal::JsonView& json) {
  if (json.json().is_null()) return {};
  const Part part(json);
  const auto& type = part.type();
  if (type == "TemplateProcessing") return read_template(part);
  if (type == "BertProcessing" || type == "RobertaProcessing") return read_pair(part);
  if (type == "Sequence") return read_sequence(part);
  if (type == "ByteLevel") return {}; // it changes offsets alone
  part.refuse("the post-processor " + type);
}

} // namespace tokenize
