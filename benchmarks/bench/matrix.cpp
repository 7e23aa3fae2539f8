#include "matrix.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "child_process.h"
#include "results_file.h"

namespace tessera::benchmarks {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr int kDeepest = 8; // of a matrix's lists and objects

/// As `settings_of`, with what is there in place of defaults.
Settings with(const json& common, const json& own) {
  for (const auto* each : {&common, &own}) TORCH_CHECK(each->is_object(), "a case is ", each->dump(), ", but must be an object");
  auto all = common;
  all.update(own);
  return settings_of(all);
}

/// All combinations of the values of `product`.
std::vector<json> combine(const json& product) {
  TORCH_CHECK(product.is_object(), "product is ", product.dump(), ", but must be an object");
  std::vector<json> all{json::object()};
  for (const auto& [key, values] : product.items()) {
    TORCH_CHECK(values.is_array() && !values.empty(), "product: ", key, " is ", values.dump(), ", but must be a list of values");
    std::vector<json> longer;
    for (const auto& each : all) {
      for (const auto& value : values) {
        longer.push_back(each);
        longer.back()[key] = value;
      }
    }
    all = std::move(longer);
  }
  return all;
}

/// What makes no difference to the measure has its default, so that a product has each case once.
Settings canonical(Settings settings) {
  const Settings defaults;
  if (settings.measure != "redistribution") {
    settings.transition = defaults.transition;
    return settings;
  }
  Settings plain;
  plain.measure = settings.measure;
  plain.width = settings.width;
  plain.ranks = settings.ranks;
  plain.transport = settings.transport;
  plain.transition = settings.transition;
  plain.steps = settings.steps;
  plain.memory_limit_mb = settings.memory_limit_mb;
  return plain;
}

MatrixCase make_case(const Settings& given) {
  const auto settings = canonical(given);
  check(settings);
  return {to_json(settings), why_impossible(settings)};
}

void add(Matrix& matrix, MatrixCase made) {
  const auto is_there = std::any_of(matrix.cases.begin(), matrix.cases.end(),
                                    [&](const MatrixCase& each) { return each.settings == made.settings; });
  if (!is_there) matrix.cases.push_back(std::move(made));
}

/// What came of a case: its status and the text that goes with it.
std::pair<std::string, std::string> judge(const Ended& ended, double time_limit) {
  if (ended.how == Ended::How::kTimeLimit) return {"time limit", fmt::format("killed after {} seconds", time_limit)};
  const auto says = [&](const char* text) { return ended.errors.find(text) != std::string::npos; };
  constexpr std::array kOutOfMemory{
      "not enough memory", "can't allocate memory",           "no memory for", "bad_alloc",
      "does not fit",      "Resource temporarily unavailable"}; // the last for a thread, which needs a stack
  if (std::any_of(kOutOfMemory.begin(), kOutOfMemory.end(), says)) return {"does not fit", ended.errors};
  if (says(" is wrong: ")) return {"wrong", ended.errors};
  if (ended.how == Ended::How::kSignal) return {"died", fmt::format("of {}. {}", strsignal(ended.code), ended.errors)};
  if (says("signal")) return {"died", ended.errors};
  return {"failed", ended.errors.empty() ? fmt::format("exit status {}", ended.code) : ended.errors};
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

/// `folder` is made for it, and goes afterwards; so does one that a killed matrix has left there.
ordered_json run_case_apart(const ordered_json& settings, double time_limit, const std::filesystem::path& folder) {
  remove_folder(folder);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TORCH_CHECK(!error, folder.string(), ": cannot be made: ", error.message());
  const auto remove = c10::make_scope_exit([&] { remove_folder(folder); });
  const auto result = folder / "result";
  const auto begin = std::chrono::steady_clock::now();
  const auto ended = run_again({"--run-case", settings.dump(), "--folder", folder.string()},
                               {{"TESSERA_TRANSPORT", settings["transport"].get<std::string>()}}, time_limit, folder);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::ifstream stream(result);
  const auto measured = ordered_json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (ended.how == Ended::How::kExit && ended.code == 0 && measured.is_object())
    return {{"settings", settings}, {"status", "ok"}, {"seconds", seconds}, {"measured", measured}};
  const auto [status, message] = judge(ended, time_limit);
  return {{"settings", settings}, {"status", status}, {"seconds", seconds}, {"message", shortened(message)}};
}

/// What differs from the defaults.
std::string describe(const ordered_json& settings) {
  const auto defaults = to_json(Settings{});
  const bool has_model = settings["measure"] != "redistribution";
  std::string text = settings["measure"].get<std::string>();
  for (const auto& [key, value] : settings.items()) {
    const bool is_always_told = key == "ranks" || (has_model && (key == "strategy" || key == "model"));
    if (key != "measure" && (is_always_told || value != defaults[key]))
      text += fmt::format(" {}={}", key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

std::string outcome(const ordered_json& result) {
  if (result["status"] != "ok") {
    const auto message = result["message"].get<std::string>();
    return result["status"].get<std::string>() + ": " + message.substr(0, message.find('\n'));
  }
  const auto& measured = result["measured"];
  return fmt::format("{:.2f} ms, {:.1f} MB at the peak", measured["milliseconds"]["p50"].get<double>(),
                     measured["peak_bytes"].get<double>() / 1e6);
}

} // namespace

bool is_time_limit(const json& value) { return value.is_number() && value > 0 && value <= kLongestSeconds; }

Matrix read_matrix(const json& object, const std::string& origin) {
  Matrix matrix;
  try {
    TORCH_CHECK(object.is_object(), "a matrix must be an object");
    for (const auto& [key, value] : object.items()) {
      const bool is_known = key == "common" || key == "product" || key == "cases" || key == "time_limit_seconds";
      TORCH_CHECK(is_known, "unknown key '", key, "'");
    }
    const auto common = object.value("common", json::object());
    const auto limit = object.value("time_limit_seconds", json(matrix.time_limit_seconds));
    TORCH_CHECK(is_time_limit(limit), "time_limit_seconds is ", limit.dump(), ", but must be positive, and at most ",
                kLongestSeconds);
    matrix.time_limit_seconds = limit;
    const auto own = object.value("cases", json::array());
    TORCH_CHECK(own.is_array(), "cases is no list");
    if (object.contains("product")) {
      for (const auto& each : combine(object["product"])) add(matrix, make_case(with(common, each)));
    }
    for (const auto& each : own) add(matrix, make_case(with(common, each)));
    TORCH_CHECK(!matrix.cases.empty(), "no cases");
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error.what_without_backtrace());
  }
  return matrix;
}

Matrix read_matrix(const std::filesystem::path& file) {
  std::ifstream stream(file);
  TORCH_CHECK(stream, file.string(), ": cannot be read: ", std::strerror(errno));
  json object;
  try {
    object = json::parse(stream, [](int depth, json::parse_event_t /*event*/, json& /*parsed*/) {
      TORCH_CHECK(depth < kDeepest, "it is nested too deeply");
      return true;
    });
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, file.string(), ": ", error.what_without_backtrace());
  } catch (const json::exception& error) {
    TORCH_CHECK(false, file.string(), ": no JSON: ", error.what());
  }
  return read_matrix(object, file.string());
}

int run_matrix(const Matrix& matrix, const std::filesystem::path& results) {
  ResultsFile file(results);
  const auto folder = std::filesystem::absolute(results.string() + ".work");
  const auto has_failed = [](const ordered_json& result) { return result["status"] != "ok" && result["status"] != "impossible"; };
  int failed = 0;
  size_t number = 0, known = 0;
  for (const auto& each : matrix.cases) {
    ++number;
    if (const auto* result = file.find(each.settings)) {
      ++known;
      failed += has_failed(*result) ? 1 : 0;
      continue;
    }
    auto result = each.impossible.empty()
                      ? run_case_apart(each.settings, matrix.time_limit_seconds, folder)
                      : ordered_json{{"settings", each.settings}, {"status", "impossible"}, {"message", each.impossible}};
    file.add(result);
    failed += has_failed(result) ? 1 : 0;
    fmt::print("{}/{} {}: {}\n", number, matrix.cases.size(), describe(each.settings), outcome(result));
    std::fflush(stdout);
  }
  if (known > 0) fmt::print("{} of {} cases were in {} before\n", known, matrix.cases.size(), results.string());
  return failed;
}

} // namespace tessera::benchmarks
