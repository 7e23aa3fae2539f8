#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <vector>

#include "settings.h"

namespace tessera::benchmarks {

/// A case of a matrix: what the file says of it, and why it cannot be run, where it cannot.
struct MatrixCase {
  nlohmann::ordered_json settings;
  std::string impossible;
};

/// A chosen set of cases.
struct Matrix {
  std::vector<MatrixCase> cases;   ///< each once
  double time_limit_seconds = 120; ///< of a case
};

inline constexpr int64_t kLongestSeconds = 1'000'000;
/// A positive number up to that.
bool is_time_limit(const nlohmann::json& value);

/// `{"common": {…}, "product": {key: [value, …], …}, "cases": [{…}, …], "time_limit_seconds": 60}`, each of which may be left
/// out: all combinations of the product's values, then the cases; what they leave out is as in `common`. Throws c10::Error that
/// names `origin` and an unknown key, or a value of the wrong kind.
Matrix read_matrix(const nlohmann::json& object, const std::string& origin);
Matrix read_matrix(const std::filesystem::path& file);

/// Runs each case that `results` does not have yet in fresh processes, and adds its result to the file, which is replaced as a
/// whole: whoever reads it, or goes on after a kill at any moment, finds each result once. Prints a line a case. A case that
/// fails is a result. Returns how many cases failed; throws c10::Error where `results` cannot be written, or is of another
/// version, machine or build.
int run_matrix(const Matrix& matrix, const std::filesystem::path& results);

} // namespace tessera::benchmarks
