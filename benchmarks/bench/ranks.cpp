#include "ranks.h"

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace tessera::benchmarks {

void join_job() {
  init_process_group();
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (threads && *threads) return;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, cores / process_context().local_world_size()));
}

std::vector<double> max_over_ranks(const std::vector<double>& values) {
  if (world_size() == 1) return values;
  std::vector<int64_t> everyone(static_cast<size_t>(world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  auto tensor = at::tensor(values, at::kDouble);
  process_context().communicator(everyone, at::kCPU, "metrics")->all_reduce(tensor, ReduceOp::kMax, "metrics").wait();
  return {tensor.const_data_ptr<double>(), tensor.const_data_ptr<double>() + tensor.numel()};
}

void wait_for_all() { max_over_ranks(0); }

} // namespace tessera::benchmarks
