// Measures cases in fresh processes:
//
//   tessera-bench --ranks 1,2 --strategy full,zero-2 --out runs/mine.json      all combinations
//   tessera-bench --matrix benchmarks/matrix.json --out runs/matrix.json       a chosen set; goes on where it was interrupted
//
// docs/benchmarks.md says what there is, and how to read it.
#include <common/program.h>

#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "case.h"
#include "matrix.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::json;

std::string usage() {
  std::string text =
      "tessera-bench: measures sharded training in fresh processes\n\n"
      "  --matrix FILE   the cases of a file; with other flags than --out and --time-limit an error\n"
      "  --out FILE      where the results go (runs/bench.json); what it has already is not measured again\n"
      "  --time-limit S  of a case, in seconds (120, or what the file says)\n\n"
      "The cases, all combinations of lists such as --ranks 1,2 --strategy full,zero-2. Their defaults:\n\n";
  const auto defaults = to_json(Settings{});
  for (const auto& [key, value] : defaults.items()) text += fmt::format("  --{:16} {}\n", key, value.dump());
  text += "\nWithout --strategy: all strategies.\n\n";
  for (const auto& [name, values] : {std::pair("measure", kMeasures), {"model", kModels}, {"transition", transitions()}}) {
    text += fmt::format("{}:", name);
    for (const auto& value : values) text += " " + value + (value == values.back() ? "\n" : ",");
  }
  return text;
}

/// `--name value` and `--name=value`.
std::map<std::string, std::string> flags_of(const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> flags;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& word = arguments[i];
    TORCH_CHECK(word.starts_with("--"), "'", word, "' belongs to no flag (see --help)");
    const auto equals = word.find('=');
    auto name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    TORCH_CHECK(equals != std::string::npos || i + 1 < arguments.size(), "--", name, " needs a value (see --help)");
    flags[name] = equals == std::string::npos ? arguments[++i] : word.substr(equals + 1);
  }
  return flags;
}

std::string take(std::map<std::string, std::string>& flags, const std::string& name, const std::string& otherwise) {
  const auto node = flags.extract(name);
  return node.empty() ? otherwise : node.mapped();
}

/// "1,2" as the kind of value that the setting has.
json values_of(const std::string& name, const std::string& text) {
  const auto defaults = to_json(Settings{});
  TORCH_CHECK(defaults.contains(name), "no flag --", name, " (see --help)");
  auto values = json::array();
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    const auto word = text.substr(begin, end - begin);
    const auto value = defaults[name].is_string() ? json(word) : json::parse(word, nullptr, /*allow_exceptions=*/false);
    TORCH_CHECK(!value.is_discarded(), "--", name, " is '", word, "', but must be ",
                defaults[name].is_boolean() ? "true or false" : "a number");
    values.push_back(value);
    begin = end + 1;
  }
  return values;
}

Matrix matrix_of(std::map<std::string, std::string> flags) {
  const bool is_limit_given = flags.contains("time-limit");
  const auto limit_text = take(flags, "time-limit", "120");
  const auto limit = json::parse(limit_text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(is_time_limit(limit), "--time-limit is '", limit_text, "', but must be a number of seconds, up to ",
              kLongestSeconds);
  if (flags.contains("matrix")) {
    auto matrix = read_matrix(std::filesystem::path(take(flags, "matrix", "")));
    TORCH_CHECK(flags.empty(), "--", flags.begin()->first, " does not go with --matrix: the file says what is measured");
    if (is_limit_given) matrix.time_limit_seconds = limit;
    return matrix;
  }
  auto product = json::object();
  for (const auto& [name, text] : flags) product[name] = values_of(name, text);
  if (!product.contains("strategy")) {
    for (const auto& row : kStrategies) product["strategy"].push_back(row.name);
  }
  return read_matrix(json{{"product", product}, {"time_limit_seconds", limit}}, "the flags");
}

int start(const std::vector<std::string>& arguments) {
  if (arguments.size() == 1 && (arguments[0] == "--help" || arguments[0] == "-h")) {
    std::fputs(usage().c_str(), stdout);
    return 0;
  }
  auto flags = flags_of(arguments);
  if (flags.contains("run-case")) {
    const std::filesystem::path folder = flags.at("folder");
    return run_case(settings_of(json::parse(flags.at("run-case"))), folder, folder / "result");
  }
  const auto results = take(flags, "out", "runs/bench.json");
  TORCH_CHECK(!results.empty(), "--out names no file");
  return run_matrix(matrix_of(std::move(flags)), results) == 0 ? 0 : 1;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("tessera-bench", [&] { return tessera::benchmarks::start({argv + 1, argv + argc}); });
}
