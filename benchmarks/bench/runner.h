#pragma once

#include <tessera/benchmarks/bench.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// `run_bench` by a program whose words on the command line are `arguments`: the processes of a case get the same. In these it
/// may not be called.
BenchReport run(const BenchModels& models, const BenchMatrix& matrix, const BenchOptions& options,
                const std::vector<std::string>& arguments);

/// Does the part of a process of a case, and returns the status for `main`. Nothing in other processes.
std::optional<int> run_as_process_of_a_case(const BenchModels& models);

} // namespace tessera::benchmarks
