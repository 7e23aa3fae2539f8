#include <tessera/benchmarks/bench.h>

#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "matrix.h"
#include "optimizers.h"
#include "results_file.h"
#include "runner.h"
#include "settings.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::json;

using Flags = std::map<std::string, std::string>;

std::vector<std::string> names_of(const BenchModels& models) {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : models.recipes()) names.push_back(name);
  return names;
}

std::string usage(const BenchModels& models, const Settings& defaults) {
  std::string text = program_name() +
                     ": measures sharded training in fresh processes\n\n"
                     "  --matrix FILE   the cases of a file; with other flags than --out and --time-limit an error\n"
                     "  --out FILE      where the results go (runs/bench.json); what it has already is not measured again\n"
                     "  --time-limit S  of a case, in seconds (120, or what the file says)\n\n"
                     "The cases, all combinations of lists such as --ranks 1,2 --strategy full,zero-2. Their defaults:\n\n";
  const auto values = to_json(canonical(defaults, models));
  for (const auto& [key, value] : values.items()) text += fmt::format("  --{:16} {}\n", key, value.dump());
  text += "\nWithout --strategy: all strategies.\n\n";
  for (const auto& [name, values] : {std::pair("measure", kMeasures),
                                     {"model", names_of(models)},
                                     {"strategy", strategy_names()},
                                     {"optimizer", optimizer_names()},
                                     {"transition", transitions()}}) {
    text += fmt::format("{}:", name);
    for (const auto& value : values) text += " " + value + (value == values.back() ? "\n" : ",");
  }
  return text;
}

/// `--name value` and `--name=value`, from the word number `first` on.
Flags flags_of(const std::vector<std::string>& arguments, size_t first) {
  Flags flags;
  for (size_t i = first; i < arguments.size(); ++i) {
    const auto& word = arguments[i];
    TORCH_CHECK(word.starts_with("--"), "'", word, "' belongs to no flag (see --help)");
    const auto equals = word.find('=');
    auto name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    TORCH_CHECK(equals != std::string::npos || i + 1 < arguments.size(), "--", name, " needs a value (see --help)");
    flags[name] = equals == std::string::npos ? arguments[++i] : word.substr(equals + 1);
  }
  return flags;
}

std::string take(Flags& flags, const std::string& name, const std::string& otherwise) {
  const auto node = flags.extract(name);
  return node.empty() ? otherwise : node.mapped();
}

/// "1,2" as the kind of value that the setting has.
json values_of(const std::string& name, const std::string& text) {
  const auto defaults = to_json(Settings{});
  TORCH_CHECK(defaults.contains(name), "no flag --", name, " (see --help); the nearest is --", nearest_setting(name));
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

std::string read_file(const std::string& file) {
  std::ifstream stream(file);
  TORCH_CHECK(stream, file, ": cannot be read: ", std::strerror(errno));
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

BenchMatrix matrix_of(Flags flags, const BenchModels& models, const Settings& defaults) {
  const bool is_limit_given = flags.contains("time-limit");
  const auto limit_text = take(flags, "time-limit", "120");
  const auto limit = json::parse(limit_text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(is_time_limit(limit), "--time-limit is '", limit_text, "', but must be a number of seconds, up to ",
              kLongestSeconds);
  if (flags.contains("matrix")) {
    const auto file = take(flags, "matrix", "");
    auto matrix = read_matrix(parse_json(read_file(file), file), models, file, defaults);
    TORCH_CHECK(flags.empty(), "--", flags.begin()->first, " does not go with --matrix: the file says what is measured");
    if (is_limit_given) matrix.time_limit_seconds = limit;
    return matrix;
  }
  auto product = json::object();
  for (const auto& [name, text] : flags) product[name] = values_of(name, text);
  if (!product.contains("strategy")) product["strategy"] = strategy_names();
  return read_matrix(json{{"product", product}, {"time_limit_seconds", limit}}, models, "the flags", defaults);
}

int start(const std::vector<std::string>& arguments, const BenchModels& models, const BenchMainOptions& main) {
  TORCH_CHECK(!models.recipes().empty(), "there is no model to measure");
  if (const auto status = run_as_process_of_a_case(models)) return *status;
  TORCH_CHECK(main.own_arguments >= 0, "bench_main: own_arguments is ", main.own_arguments, ", but cannot be negative");
  const auto first = 1 + static_cast<size_t>(main.own_arguments);
  if (arguments.size() == first + 1 && (arguments[first] == "--help" || arguments[first] == "-h")) {
    std::fputs(usage(models, main.defaults).c_str(), stdout);
    return 0;
  }
  auto flags = flags_of(arguments, first);
  BenchOptions options;
  options.results = take(flags, "out", options.results.string());
  TORCH_CHECK(!options.results.empty(), "--out names no file");
  options.progress = [](const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  };
  const auto matrix = matrix_of(std::move(flags), models, main.defaults);
  return run(models, matrix, options, arguments).failed() == 0 ? 0 : 1;
}

} // namespace
} // namespace tessera::benchmarks

namespace tessera {

int bench_main(int argc, char** argv, const BenchModels& models, const BenchMainOptions& options) noexcept try {
  return benchmarks::start({argv, argv + argc}, models, options);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s: %s\n", benchmarks::program_name().c_str(), internal::error_text(error).c_str());
  return 1;
}

} // namespace tessera
