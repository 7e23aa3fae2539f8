#pragma once

#include <tessera/collectives/process_context.h>

#include <vector>

namespace tessera::benchmarks {

inline int rank() { return process_context().rank(); }
inline int world_size() { return process_context().world_size(); }

/// Sets up this process's part in the job. Every rank calls it first.
void join_job();

/// The element-wise maxima over all ranks. Every rank calls it, with equally many values.
std::vector<double> max_over_ranks(const std::vector<double>& values);
inline double max_over_ranks(double value) { return max_over_ranks(std::vector<double>{value})[0]; }

/// Returns when all ranks have called it.
void wait_for_all();

} // namespace tessera::benchmarks
