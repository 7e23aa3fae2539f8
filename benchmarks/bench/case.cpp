#include "case.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/explain.h>

#include <unistd.h>

#include <cstdint>
#include <exception>
#include <fstream>
#include <memory>
#include <string>

#include "child_process.h"
#include "figures.h"
#include "memory_groups.h"
#include "memory_meter.h"
#include "optimizers.h"
#include "prediction.h"
#include "ranks.h"
#include "settings.h"
#include "trial.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kMegabyte = 1'000'000;
constexpr int kWarmUpRuns = 2;

struct Case {
  Settings settings;
  std::string memory_groups;
  std::filesystem::path folder;
};

Case read_case(const std::filesystem::path& folder) {
  std::ifstream stream(folder / "case");
  const auto object = nlohmann::json::parse(stream);
  return {settings_of(object.at("settings")), object.at("memory_groups"), folder};
}

/// Peak bytes of the largest rank, with all that the case holds, in warm runs.
int64_t warm_up(Trial& trial, MemoryMeter& meter) {
  for (int i = 0; i < kWarmUpRuns; ++i) {
    if (i + 1 == kWarmUpRuns) meter.forget_peak();
    trial.prepare();
    trial.run();
  }
  return static_cast<int64_t>(max_over_ranks(static_cast<double>(meter.peak())));
}

/// How the memory of this rank is limited, for people; empty where it is not. What is far beyond a limit of tensors fails as it
/// does where a machine has no more: the stacks of threads are no part of it, but count for the system.
std::string limit_memory(const Case& each) {
  const auto& settings = each.settings;
  constexpr int64_t kStacks = 512 * kMegabyte;
  if (settings.memory_limit_mb == 0) return "";
  const auto limit = settings.memory_limit_mb * kMegabyte;
  if (settings.limit == "tensors") {
    limit_data_segment(limit + kStacks);
    return "what tensors hold";
  }
  if (!each.memory_groups.empty()) {
    enter_memory_group(each.memory_groups, rank());
    return "control group";
  }
  limit_data_segment(limit);
  return "data segment";
}

void check_peak(const Settings& settings, int64_t peak) {
  const bool fits = settings.memory_limit_mb == 0 || settings.limit == "process" || peak <= settings.memory_limit_mb * kMegabyte;
  TORCH_CHECK(fits, "does not fit: a rank held ", peak, " bytes of the ", settings.memory_limit_mb, " MB that it may");
}

ordered_json times_of(const Settings& settings, const Trial& trial, const Figures& figures) {
  const auto runs = static_cast<double>(settings.steps);
  const auto milliseconds = summary_of(figures.runs);
  ordered_json measured{{"runs", settings.steps}, {"milliseconds", milliseconds}};
  for (const auto& [part, sum] : figures.parts) measured["parts"][part] = sum / runs;
  const auto items = static_cast<double>(trial.items() * world_size());
  if (is_of_a_step(settings)) measured["items_per_second"] = 1e3 * items / milliseconds["mean"].get<double>();
  if (is_of_a_step(settings)) measured["losses"] = figures.losses;
  measured["exposed_milliseconds"] = figures.exposed / runs;
  measured["sent"] = json_of(figures.sent, runs);
  return measured;
}

/// What `explain` says of the peak, from the activations of the unsharded forward that the result was compared with.
bool knows_activations(const Settings& settings) {
  return is_of_a_step(settings) && settings.precision == "fp32" && !settings.recompute && settings.verify;
}

ordered_json describe(const Settings& settings, Trial& trial, const Figures& figures, int64_t peak) {
  auto measured = times_of(settings, trial, figures);
  measured["parameters"] = trial.parameter_count();
  measured["state_bytes"] = static_cast<int64_t>(max_over_ranks(static_cast<double>(trial.state_bytes())));
  measured["peak_bytes"] = peak;
  measured["process_peak_bytes"] = static_cast<int64_t>(max_over_ranks(static_cast<double>(largest_resident_set())));
  if (knows_activations(settings)) {
    const auto predicted = explain(trial.module(), {.optimizer_tensors = optimizer_tensors(settings.optimizer),
                                                    .activation_bytes = trial.activation_bytes()})
                               .memory.peak;
    measured["explained_peak_bytes"] = static_cast<int64_t>(max_over_ranks(static_cast<double>(predicted)));
  }
  measured["verified"] = settings.verify; // or it threw
  return measured;
}

void write_text(const std::filesystem::path& file, const std::string& text) {
  std::ofstream stream(file);
  stream << text << std::flush;
  TORCH_CHECK(stream.good(), file.string(), ": cannot be written");
}

/// On one rank. The first writes the result.
void run_rank(const Case& each, const BenchRecipe& recipe) {
  join_job();
  const auto& settings = each.settings;
  const auto limited_by = limit_memory(each);
  auto meter = std::make_unique<MemoryMeter>();
  Trial trial(settings, recipe, each.folder, *meter);
  trial.verify();
  const auto peak = warm_up(trial, *meter);
  check_peak(settings, peak);
  meter.reset(); // it takes time
  auto figures = measure(trial, settings);
  figures.take_slowest();
  auto measured = describe(settings, trial, figures, peak);
  if (!limited_by.empty()) measured["limited_by"] = limited_by;
  if (rank() == 0) write_text(each.folder / "result", measured.dump());
}

/// Of the first rank that fails, for a program that does not end with the status that it is given.
void leave_error(const std::filesystem::path& folder, const std::string& text) {
  const auto own = folder / ("error-" + std::to_string(getpid()));
  std::ofstream(own) << text << std::flush;
  link(own.c_str(), (folder / "rank_error").c_str()); // fails where another was first
}

int run(const Case& each, const BenchModels& models) {
  const auto& settings = each.settings;
  const auto& recipe = recipe_of(settings, models);
  if (settings.measure == "explain") {
    write_text(each.folder / "result", predict(settings, recipe).dump());
    return 0;
  }
  return launch(settings.ranks, [&] {
    try {
      run_rank(each, recipe);
    } catch (...) {
      leave_error(each.folder, internal::error_text(std::current_exception()));
      throw;
    }
    destroy_process_group();
  });
}

} // namespace

void write_case(const std::filesystem::path& folder, const BenchSettings& settings, const std::string& memory_groups) {
  write_text(folder / "case", ordered_json{{"settings", to_json(settings)}, {"memory_groups", memory_groups}}.dump());
}

int run_case(const std::filesystem::path& folder, const BenchModels& models) noexcept try {
  return run(read_case(folder), models);
} catch (...) {
  std::ofstream(folder / "error") << internal::error_text(std::current_exception());
  return 1;
}

ordered_json read_result(const std::filesystem::path& folder) {
  std::ifstream stream(folder / "result");
  auto result = ordered_json::parse(stream, nullptr, /*allow_exceptions=*/false);
  return result.is_object() ? result : ordered_json();
}

std::string read_error(const std::filesystem::path& folder) {
  const auto text = content_of(folder / "error");
  return text.empty() ? content_of(folder / "rank_error") : text;
}

} // namespace tessera::benchmarks
