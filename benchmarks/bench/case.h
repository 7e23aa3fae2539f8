#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

#include "settings.h"

namespace tessera::benchmarks {

/// Measures one case and writes what was measured to `result`, from the first rank. Runs the ranks of the case, of which each
/// comes here again with the same arguments. `folder` exists, and is for what the case writes. Returns the exit status; throws
/// what the first rank that failed threw.
int run_case(const Settings& settings, const std::filesystem::path& folder, const std::filesystem::path& result);

} // namespace tessera::benchmarks
