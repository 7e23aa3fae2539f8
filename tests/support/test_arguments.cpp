#include "test_arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <string_view>

namespace tessera::testing {
namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

/// The value of `--name value` or `--name=value`, which goes out of the arguments.
std::optional<std::string> take(const std::string& name, int& argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument(argv[i]);
    const bool is_joined = argument.starts_with(name + "=");
    if (!is_joined && argument != name) continue;
    TORCH_CHECK(is_joined || i + 1 < argc, name, " needs a value");
    std::string value = is_joined ? std::string(argument.substr(name.size() + 1)) : argv[i + 1];
    const int taken = is_joined ? 1 : 2;
    std::copy(argv + i + taken, argv + argc + 1, argv + i); // with the null pointer that ends them
    argc -= taken;
    return value;
  }
  return std::nullopt;
}

int number_of_ranks(const std::string& text) {
  int ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ranks);
  TORCH_CHECK(error == std::errc() && end == text.data() + text.size() && ranks > 0, "--ranks needs a number, not '", text, "'");
  return ranks;
}

} // namespace

std::string TestWorld::name() const {
  if (ranks == 0) return "this process";
  return c10::str(ranks, ranks == 1 ? " rank" : " ranks", hosts.empty() ? "" : " on hosts ", hosts);
}

TestArguments take_test_arguments(int& argc, char** argv) {
  TestArguments arguments;
  if (const auto ranks = take("--ranks", argc, argv)) {
    for (const auto& part : split(*ranks)) arguments.worlds.push_back({.ranks = number_of_ranks(part)});
  }
  if (const auto hosts = take("--hosts", argc, argv)) {
    for (const auto& part : split(*hosts)) arguments.worlds.push_back({.ranks = static_cast<int>(part.size()), .hosts = part});
  }
  if (const auto files = take("--files", argc, argv)) arguments.files = split(*files);
  if (arguments.worlds.empty()) arguments.worlds.emplace_back();
  return arguments;
}

} // namespace tessera::testing
