#include <tessera/collectives/topology.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace tessera {

namespace {

using Json = nlohmann::json;

void check_link(const Link& link, const char* name) {
  for (const auto& [value, part] : {std::pair(link.alpha, "alpha"), std::pair(link.beta, "beta")})
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, "topology: ", part, " of ", name, " is ", value,
                      ", but must be a time, in seconds");
}

/// Of a list or an object its kind alone: `dump` goes down as deep as they are nested, which may be deeper than the stack.
std::string text_of(const Json& value) { return value.is_structured() ? c10::str("an ", value.type_name()) : value.dump(); }

void check_keys(const Json& object, const char* what, std::initializer_list<std::string_view> known) {
  TORCH_CHECK_VALUE(object.is_object(), "topology: ", what, " is no object, but ", text_of(object));
  for (const auto& [key, value] : object.items())
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), key) != known.end(), "topology: ", what, " has an unknown key \"",
                      key, "\"");
}

template <typename T>
T number(const Json& object, const char* what, const char* key, T missing) {
  const auto found = object.find(key);
  if (found == object.end()) return missing;
  const bool fits = std::is_integral_v<T> ? found->is_number_integer() : found->is_number();
  TORCH_CHECK_VALUE(fits, "topology: \"", key, "\" of ", what, " is ", text_of(*found), ", but must be a",
                    std::is_integral_v<T> ? " whole" : "", " number");
  return found->get<T>();
}

Link::Algorithm algorithm_of(const Json& object, const char* what) {
  const auto found = object.find("algorithm");
  if (found == object.end() || *found == "ring") return Link::Algorithm::kRing;
  TORCH_CHECK_VALUE(*found == "recursive", "topology: \"algorithm\" of ", what, " is ", text_of(*found),
                    ", but must be \"ring\" or \"recursive\"");
  return Link::Algorithm::kRecursive;
}

Link link_of(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end()) return {};
  check_keys(*found, key, {"alpha", "beta", "algorithm"});
  return {number(*found, key, "alpha", 0.0), number(*found, key, "beta", 0.0), algorithm_of(*found, key)};
}

Json to_json(const Link& link) {
  return {
      {"alpha", link.alpha}, {"beta", link.beta}, {"algorithm", link.algorithm == Link::Algorithm::kRing ? "ring" : "recursive"}};
}

} // namespace

void Topology::check() const {
  constexpr int64_t kMost = std::numeric_limits<int>::max(); // what a rank's type holds
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMost, "topology: there are ", ranks, " ranks, but must be between 1 and ", kMost);
  TORCH_CHECK_VALUE(ranks_per_node >= 1 && ranks_per_node <= kMost, "topology: a node has ", ranks_per_node,
                    " ranks, but must have between 1 and ", kMost);
  check_link(in_node, "in_node");
  check_link(between_nodes, "between_nodes");
}

Topology Topology::from_json(std::string_view text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, "topology: ", error.what());
  }
  check_keys(json, "the topology", {"ranks", "ranks_per_node", "in_node", "between_nodes"});
  Topology topology;
  topology.ranks = number(json, "the topology", "ranks", int64_t{1});
  topology.ranks_per_node = number(json, "the topology", "ranks_per_node", int64_t{1});
  topology.in_node = link_of(json, "in_node");
  topology.between_nodes = link_of(json, "between_nodes");
  topology.check();
  return topology;
}

Topology Topology::read(const std::string& file) {
  const std::ifstream stream(file);
  TORCH_CHECK_VALUE(stream.good() && !std::filesystem::is_directory(file), "topology: cannot read ", file);
  std::ostringstream text;
  text << stream.rdbuf();
  try {
    return from_json(text.str());
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(ValueError, c10::str(file, ": ", error.what_without_backtrace()));
  }
}

std::string Topology::to_json() const {
  return Json{{"ranks", ranks},
              {"ranks_per_node", ranks_per_node},
              {"in_node", tessera::to_json(in_node)},
              {"between_nodes", tessera::to_json(between_nodes)}}
      .dump(1);
}

} // namespace tessera
