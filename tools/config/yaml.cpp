#include "yaml.h"

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <c10/util/Exception.h>
#include <yaml-cpp/yaml.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>

namespace tools {

namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr int64_t kMostNodes = 100'000; // a node that many others name counts each time

Json scalar_of(const YAML::Node& node) {
  const auto& text = node.Scalar();
  if (node.Tag() == "!") return text; // in quotes
  const auto lower = absl::AsciiStrToLower(text);
  constexpr auto kTrue = std::to_array<const char*>({"true", "yes", "on"}),
                 kFalse = std::to_array<const char*>({"false", "no", "off"});
  if (std::find(kTrue.begin(), kTrue.end(), lower) != kTrue.end()) return true;
  if (std::find(kFalse.begin(), kFalse.end(), lower) != kFalse.end()) return false;
  int64_t integer = 0;
  if (absl::SimpleAtoi(text, &integer)) return integer;
  double number = 0;
  const bool begins_as_number = !text.empty() && text.find_first_not_of("+-.0123456789eE") == std::string::npos;
  if (begins_as_number && absl::SimpleAtod(text, &number)) return number;
  return text;
}

/// `left`: nodes that may still come.
Json json_of(const YAML::Node& node, const std::string& path, int depth, int64_t& left) {
  TORCH_CHECK(depth < kMaxDepth, path, ": YAML nested deeper than ", kMaxDepth);
  TORCH_CHECK(--left >= 0, path, ": YAML of more than ", kMostNodes, " values");
  if (node.IsScalar()) return scalar_of(node);
  if (node.IsSequence()) {
    auto list = Json::array();
    for (const auto& each : node) list.push_back(json_of(each, path, depth + 1, left));
    return list;
  }
  if (!node.IsMap()) return nullptr;
  auto object = Json::object();
  for (const auto& item : node) {
    const auto key = item.first.Scalar();
    TORCH_CHECK_VALUE(!object.contains(key), path, ": line ", item.first.Mark().line + 1, ": the key ", key, " appears twice");
    object[key] = json_of(item.second, path, depth + 1, left);
  }
  return object;
}

YAML::Node load(const std::string& path) {
  try {
    return YAML::LoadFile(path);
  } catch (const YAML::BadFile&) {
    TORCH_CHECK(false, "cannot read ", path);
  } catch (const YAML::Exception& error) {
    TORCH_CHECK_VALUE(false, path, ": line ", error.mark.line + 1, ": not valid YAML: ", error.msg);
  }
}

} // namespace

std::string json_of_yaml(const std::string& path) {
  const auto root = load(path);
  TORCH_CHECK_VALUE(root.IsMap(), path, ": the file has no keys");
  auto left = kMostNodes;
  return json_of(root, path, 0, left).dump();
}

} // namespace tools
