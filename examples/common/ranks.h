#pragma once

#include <vector>

namespace examples {

/// Sets up this process's part in the job: its process group and its threads (`threads` 0: OMP_NUM_THREADS, or else the cores
/// divided by the ranks of this host). Every rank calls it first.
void join_job(int threads);

/// This process's rank, and the number of ranks, of the job.
int rank();
int world_size();

/// The element-wise sums, means and maxima over all ranks. Every rank calls them, with equally many values.
std::vector<double> sum_over_ranks(const std::vector<double>& values);
std::vector<double> mean_over_ranks(const std::vector<double>& values);
std::vector<double> max_over_ranks(const std::vector<double>& values);

} // namespace examples
