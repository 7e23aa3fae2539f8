#include "matrix.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace tessera::benchmarks {
namespace {

using nlohmann::json;

constexpr int kDeepest = 8; // of a matrix's lists and objects

/// As `settings_of`, with what is there in place of defaults.
Settings with(const json& common, const json& own, const Settings& defaults) {
  for (const auto* each : {&common, &own}) TORCH_CHECK(each->is_object(), "a case is ", each->dump(), ", but must be an object");
  auto all = common;
  all.update(own);
  return settings_of(all, defaults);
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

void add(BenchMatrix& matrix, const Settings& given, const BenchModels& models) {
  const auto made = canonical(given, models);
  check(made, models);
  const auto is_there =
      std::any_of(matrix.cases.begin(), matrix.cases.end(), [&](const Settings& each) { return to_json(each) == to_json(made); });
  if (!is_there) matrix.cases.push_back(made);
}

void check_keys(const json& object) {
  TORCH_CHECK(object.is_object(), "a matrix must be an object");
  for (const auto& [key, value] : object.items()) {
    const bool is_known = key == "common" || key == "product" || key == "cases" || key == "time_limit_seconds";
    TORCH_CHECK(is_known, "unknown key '", key, "'; there are common, product, cases and time_limit_seconds");
  }
}

} // namespace

bool is_time_limit(const json& value) { return value.is_number() && value > 0 && value <= kLongestSeconds; }

Settings canonical(Settings settings, const BenchModels& models) {
  if (settings.model.empty() && !models.recipes().empty()) settings.model = models.recipes().front().first;
  const Settings defaults;
  if (settings.measure != "redistribution") {
    settings.transition = defaults.transition;
    return settings;
  }
  Settings plain;
  plain.measure = settings.measure;
  plain.model = settings.model;
  plain.width = settings.width;
  plain.ranks = settings.ranks;
  plain.transport = settings.transport;
  plain.transition = settings.transition;
  plain.steps = settings.steps;
  plain.memory_limit_mb = settings.memory_limit_mb;
  plain.limit = settings.limit;
  if (!models.recipes().empty()) plain.model = models.recipes().front().first; // none is built
  return plain;
}

BenchMatrix read_matrix(const json& object, const BenchModels& models, const std::string& origin, const Settings& defaults) {
  BenchMatrix matrix;
  try {
    check_keys(object);
    const auto common = object.value("common", json::object());
    const auto limit = object.value("time_limit_seconds", json(matrix.time_limit_seconds));
    TORCH_CHECK(is_time_limit(limit), "time_limit_seconds is ", limit.dump(), ", but must be positive, and at most ",
                kLongestSeconds);
    matrix.time_limit_seconds = limit;
    const auto own = object.value("cases", json::array());
    TORCH_CHECK(own.is_array(), "cases is no list");
    if (object.contains("product")) {
      for (const auto& each : combine(object["product"])) add(matrix, with(common, each, defaults), models);
    }
    for (const auto& each : own) add(matrix, with(common, each, defaults), models);
    TORCH_CHECK(!matrix.cases.empty(), "no cases");
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error.what_without_backtrace());
  }
  return matrix;
}

json parse_json(const std::string& text, const std::string& origin) {
  try {
    return json::parse(text, [](int depth, json::parse_event_t /*event*/, json& /*parsed*/) {
      TORCH_CHECK(depth < kDeepest, "it is nested too deeply");
      return true;
    });
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, origin, ": ", error.what_without_backtrace());
  } catch (const json::exception& error) {
    TORCH_CHECK(false, origin, ": no JSON: ", error.what());
  }
}

} // namespace tessera::benchmarks

namespace tessera {

BenchMatrix parse_bench_matrix(const std::string& text, const BenchModels& models, const std::string& origin) {
  return benchmarks::read_matrix(benchmarks::parse_json(text, origin), models, origin);
}

} // namespace tessera
