#include <tessera/benchmarks/bench.h>

#include <c10/util/Exception.h>
#include <tessera/base/text_table.h>

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "runner.h"

namespace tessera {
namespace {

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  TORCH_CHECK(!arguments.empty(), "run_bench: cannot read /proc/self/cmdline");
  return arguments;
}

internal::TextRow row_of(const BenchResult& result) {
  const auto& settings = result.settings;
  const auto number = [&](const char* format, double value) {
    return result.status == "ok" && value > 0 ? fmt::format(fmt::runtime(format), value) : "";
  };
  return {settings.measure,
          settings.model,
          std::to_string(settings.ranks),
          settings.strategy,
          settings.layout,
          settings.precision,
          settings.offload,
          settings.recompute ? "yes" : "",
          result.status,
          number("{:.2f}", result.milliseconds),
          number("{:.0f}", result.items_per_second),
          number("{:.1f}", static_cast<double>(result.state_bytes) / 1e6),
          number("{:.1f}", static_cast<double>(result.peak_bytes) / 1e6)};
}

} // namespace

BenchModels& BenchModels::add(const std::string& name, BenchRecipe recipe) {
  TORCH_CHECK(!name.empty(), "a model needs a name");
  TORCH_CHECK(recipe.model, "model '", name, "': its recipe does not say how to make it");
  TORCH_CHECK(recipe.batch, "model '", name, "': its recipe does not say how to make a batch");
  const auto has_name = [&](const auto& each) { return each.first == name; };
  TORCH_CHECK(std::none_of(recipes_.begin(), recipes_.end(), has_name), "there are two models with the name '", name, '\'');
  recipes_.emplace_back(name, std::move(recipe));
  return *this;
}

int BenchReport::failed() const {
  const auto has_failed = [](const BenchResult& result) { return result.status != "ok" && result.status != "impossible"; };
  return static_cast<int>(std::count_if(results.begin(), results.end(), has_failed));
}

std::string BenchReport::to_string() const {
  std::vector<internal::TextRow> rows{{"measure", "model", "ranks", "strategy", "layout", "precision", "offload", "recompute",
                                       "status", "ms", "items/s", "state MB", "peak MB"}};
  for (const auto& result : results) rows.push_back(row_of(result));
  return internal::text_table(rows, {"ranks", "ms", "items/s", "state MB", "peak MB"});
}

std::optional<BenchReport> run_bench(const BenchModels& models, const BenchMatrix& matrix, const BenchOptions& options) {
  TORCH_CHECK(!models.recipes().empty(), "run_bench: there is no model");
  if (benchmarks::run_as_process_of_a_case(models)) return std::nullopt;
  return benchmarks::run(models, matrix, options, command_line());
}

} // namespace tessera
