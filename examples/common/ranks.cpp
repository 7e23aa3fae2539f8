#include "common/ranks.h"

#include <tessera/collectives/process_context.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace examples {
namespace {

std::vector<double> reduce(const std::vector<double>& values, tessera::ReduceOp op) {
  if (world_size() == 1) return values;
  std::vector<int64_t> everyone(static_cast<size_t>(world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  auto tensor = torch::tensor(values, torch::kDouble);
  tessera::process_context().communicator(everyone, torch::kCPU, "metrics")->all_reduce(tensor, op, "metrics").wait();
  return {tensor.const_data_ptr<double>(), tensor.const_data_ptr<double>() + tensor.numel()};
}

bool chooses_threads() {
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  return threads && *threads;
}

int default_threads() {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / tessera::process_context().local_world_size());
}

} // namespace

void join_job(int threads) {
  tessera::init_process_group();
  if (threads == 0 && !chooses_threads()) threads = default_threads();
  if (threads > 0) torch::set_num_threads(threads);
}

int rank() { return tessera::process_context().rank(); }
int world_size() { return tessera::process_context().world_size(); }

std::vector<double> sum_over_ranks(const std::vector<double>& values) { return reduce(values, tessera::ReduceOp::kSum); }
std::vector<double> max_over_ranks(const std::vector<double>& values) { return reduce(values, tessera::ReduceOp::kMax); }

std::vector<double> mean_over_ranks(const std::vector<double>& values) {
  auto means = sum_over_ranks(values);
  for (auto& mean : means) mean /= world_size();
  return means;
}

} // namespace examples
