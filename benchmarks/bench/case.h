#pragma once

#include <tessera/benchmarks/bench.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

namespace tessera::benchmarks {

/// Leaves in `folder` what `run_case` needs. `memory_groups` is what `enter_memory_group` takes, empty for none.
void write_case(const std::filesystem::path& folder, const BenchSettings& settings, const std::string& memory_groups);

/// Measures the case that was left in `folder`. Runs its ranks, of which each comes here again, and leaves in `folder` what was
/// measured, or the text of an error. Returns the status for `main`.
int run_case(const std::filesystem::path& folder, const BenchModels& models) noexcept;

/// Of a case that has ended: null where there is none.
nlohmann::ordered_json read_result(const std::filesystem::path& folder);
/// Empty where it left none.
std::string read_error(const std::filesystem::path& folder);

} // namespace tessera::benchmarks
