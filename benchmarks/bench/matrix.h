#pragma once

#include <tessera/benchmarks/bench.h>

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "settings.h"

namespace tessera::benchmarks {

inline constexpr int64_t kLongestSeconds = 1'000'000;
/// A positive number up to that.
bool is_time_limit(const nlohmann::json& value);

/// Throws c10::Error that names `origin` for a text that is no JSON, or is nested too deeply.
nlohmann::json parse_json(const std::string& text, const std::string& origin);

/// As `parse_bench_matrix`, with what no case says as in `defaults`.
BenchMatrix read_matrix(const nlohmann::json& object, const BenchModels& models, const std::string& origin,
                        const Settings& defaults = {});

/// What makes no difference to the measure has its default, so that a product has each case once; an empty model is the first.
Settings canonical(Settings settings, const BenchModels& models);

} // namespace tessera::benchmarks
