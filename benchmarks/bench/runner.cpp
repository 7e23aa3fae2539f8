#include "runner.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "case.h"
#include "child_process.h"
#include "matrix.h"
#include "memory_groups.h"
#include "results_file.h"
#include "settings.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::ordered_json;

constexpr const char* kCaseVariable = "TESSERA_BENCH_CASE"; // the folder of a case, in its processes

/// A case has ended: how, and what it left.
struct End {
  Ended process;
  std::string error;                ///< that it noticed itself
  std::optional<int> out_of_memory; ///< the rank that its control group has ended
};

/// Its status and the text that goes with it.
std::pair<std::string, std::string> judge(const End& end, const Settings& settings, double time_limit) {
  if (end.out_of_memory)
    return {"does not fit", fmt::format("rank {} needs more than the {} MB of its control group, and was killed",
                                        *end.out_of_memory, settings.memory_limit_mb)};
  if (end.process.how == Ended::How::kTimeLimit) return {"time limit", fmt::format("killed after {} seconds", time_limit)};
  const auto& text = end.error.empty() ? end.process.errors : end.error;
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  constexpr std::array kOutOfMemory{
      "not enough memory", "can't allocate memory",           "no memory for", "bad_alloc",
      "does not fit",      "Resource temporarily unavailable"}; // the last for a thread, which needs a stack
  if (std::any_of(kOutOfMemory.begin(), kOutOfMemory.end(), says)) return {"does not fit", text};
  if (says(" is wrong: ")) return {"wrong", text};
  if (end.process.how == Ended::How::kSignal) return {"died", fmt::format("of {}. {}", strsignal(end.process.code), text)};
  if (says("was killed by signal")) return {"died", text};
  return {"failed", text.empty() ? fmt::format("it ended with status {} and no result", end.process.code) : text};
}

std::string shortened(std::string text) {
  constexpr size_t kMost = 1000;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.size() > kMost ? text.substr(0, kMost) + " …" : text;
}

void remove_folder(const std::filesystem::path& folder) {
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

bool needs_groups(const Settings& settings) {
  return settings.memory_limit_mb > 0 && settings.limit == "process" && settings.measure != "explain";
}

/// The processes of the case, from their start to their end.
ordered_json run_processes(const Settings& settings, double time_limit, const std::filesystem::path& folder,
                           const std::vector<std::string>& arguments) {
  constexpr int64_t kMegabyte = 1'000'000;
  const MemoryGroups groups(needs_groups(settings) ? settings.ranks : 0, settings.memory_limit_mb * kMegabyte);
  write_case(folder, settings, groups.prefix());
  End end{.process = run_again(arguments, {{"TESSERA_TRANSPORT", settings.transport}, {kCaseVariable, folder.string()}},
                               time_limit, folder),
          .error = read_error(folder),
          .out_of_memory = groups.first_ended()};
  auto measured = read_result(folder);
  if (groups.peak() > 0) measured["group_peak_bytes"] = groups.peak();
  const bool is_ok = end.process.how != Ended::How::kTimeLimit && end.error.empty() && !end.out_of_memory;
  if (is_ok && measured.contains("verified")) return {{"status", "ok"}, {"measured", measured}};
  const auto [status, message] = judge(end, settings, time_limit);
  return {{"status", status}, {"message", shortened(message)}};
}

/// `folder` is made for it, and goes afterwards; so does one that a killed matrix has left there.
ordered_json run_case_apart(const Settings& settings, double time_limit, const std::filesystem::path& folder,
                            const std::vector<std::string>& arguments) {
  if (const auto why = why_impossible(settings); !why.empty()) return {{"status", "impossible"}, {"message", why}};
  remove_folder(folder);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TORCH_CHECK(!error, folder.string(), ": cannot be made: ", error.message());
  const auto remove = c10::make_scope_exit([&] { remove_folder(folder); });
  const auto begin = std::chrono::steady_clock::now();
  auto result = run_processes(settings, time_limit, folder, arguments);
  result["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

/// What differs from the defaults.
std::string describe(const Settings& settings) {
  const auto defaults = to_json(Settings{}), values = to_json(settings);
  const bool has_model = settings.measure != "redistribution";
  std::string text = settings.measure;
  for (const auto& [key, value] : values.items()) {
    const bool is_always_told = key == "ranks" || (has_model && (key == "strategy" || key == "model"));
    const bool is_told = key != "measure" && (has_model || key != "model");
    if (is_told && (is_always_told || value != defaults[key]))
      text += fmt::format(" {}={}", key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

BenchResult result_of(const ordered_json& object, const Settings& settings) {
  BenchResult result{.settings = settings,
                     .status = object.at("status"),
                     .message = object.value("message", ""),
                     .seconds = object.value("seconds", 0.0)};
  if (result.status != "ok") return result;
  const auto& measured = object.at("measured");
  result.measured = measured.dump();
  if (measured.contains("milliseconds")) result.milliseconds = measured["milliseconds"].at("p50");
  result.items_per_second = measured.value("items_per_second", 0.0);
  result.state_bytes = measured.value("state_bytes", int64_t{0});
  result.peak_bytes = measured.value(settings.measure == "explain" ? "explained_peak_bytes" : "peak_bytes", int64_t{0});
  return result;
}

std::string outcome(const BenchResult& result) {
  if (result.status != "ok") return result.status + ": " + result.message.substr(0, result.message.find('\n'));
  const double megabytes = static_cast<double>(result.peak_bytes) / 1e6;
  if (result.settings.measure == "explain") return fmt::format("{:.1f} MB at the peak, it is predicted", megabytes);
  return fmt::format("{:.2f} ms, {:.1f} MB at the peak", result.milliseconds, megabytes);
}

BenchReport run_matrix(const BenchModels& models, const BenchMatrix& matrix, const BenchOptions& options,
                       const std::vector<std::string>& arguments) {
  const auto say = [&](const std::string& line) {
    if (options.progress) options.progress(line);
  };
  ResultsFile file(options.results);
  const auto folder = std::filesystem::absolute(options.results.string() + ".work");
  BenchReport report;
  size_t known = 0;
  for (const auto& each : matrix.cases) {
    const auto settings = canonical(each, models);
    if (const auto* before = file.find(to_json(settings))) {
      ++known;
      report.results.push_back(result_of(*before, settings));
      continue;
    }
    ordered_json result{{"settings", to_json(settings)}};
    result.update(run_case_apart(settings, matrix.time_limit_seconds, folder, arguments));
    file.add(result);
    report.results.push_back(result_of(result, settings));
    say(fmt::format("{}/{} {}: {}", report.results.size(), matrix.cases.size(), describe(settings),
                    outcome(report.results.back())));
  }
  if (known > 0) say(fmt::format("{} of {} cases were in {} before", known, matrix.cases.size(), options.results.string()));
  return report;
}

} // namespace

std::optional<int> run_as_process_of_a_case(const BenchModels& models) {
  const char* const folder = std::getenv(kCaseVariable);
  if (!folder) return std::nullopt;
  end_with_parent();
  return run_case(folder, models);
}

BenchReport run(const BenchModels& models, const BenchMatrix& matrix, const BenchOptions& options,
                const std::vector<std::string>& arguments) {
  for (const auto& each : matrix.cases) check(canonical(each, models), models);
  TORCH_CHECK(is_time_limit(matrix.time_limit_seconds), "time_limit_seconds is ", matrix.time_limit_seconds,
              ", but must be positive, and at most ", kLongestSeconds);
  return run_matrix(models, matrix, options, arguments);
}

} // namespace tessera::benchmarks
