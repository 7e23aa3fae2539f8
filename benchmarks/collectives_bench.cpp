// The collectives on n local ranks, or on those of the job that the environment describes, beside c10d's gloo process group: a
// line of JSON for each collective and size, with the median seconds of the slowest rank. A size is a multiple of 4 × ranks
// bytes; the six default sizes are rounded up to one. The cases of a line take turns, after a warm-up: of one call, or of 20 in a
// row where a call has at most 64 KiB. "shared" has its tensors in the memory that the communicator allocates, as `fully_shard`
// does; "copy" is what each rank takes to copy as many bytes of its own at the same time.
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <absl/flags/flag.h>
#include <common/command_line.h>
#include <common/program.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "median.h"

ABSL_FLAG(int32_t, ranks, 0, "local ranks to start; 0: the environment (torchrun, Slurm, mpirun) says what rank this process is");
ABSL_FLAG(int32_t, iterations, 50, "turns of each case; a fifth for more than 8 MiB");
ABSL_FLAG(int64_t, bytes, 0, "size of the only collectives to measure, a multiple of 4 × ranks; 0: six sizes, and barriers");

namespace {

using tessera::ReduceOp;

struct Case {
  const char* name;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

c10::intrusive_ptr<c10d::ProcessGroupGloo> make_peer() {
  auto& context = tessera::process_context();
  auto options = c10d::ProcessGroupGloo::Options::create(context.options().timeout);
  using Peer = c10d::ProcessGroupGloo;
  options->devices.push_back(tessera::is_launched_rank() ? Peer::createDeviceForHostname("127.0.0.1")
                                                         : Peer::createDefaultDevice());
  return c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("bench", context.store()),
                                                     context.rank(), context.world_size(), options);
}

class Bench {
 public:
  explicit Bench(int iterations) : iterations_(iterations), peer_(make_peer()) {
    auto& context = tessera::process_context();
    std::vector<int64_t> ranks(context.world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
    group_ = context.communicator(ranks, at::kCPU);
  }

  void run(int64_t bytes) {
    const int n = group_->size();
    const int64_t numel = bytes / kItemBytes;
    auto full = zeros(numel), part = zeros(numel / n), other = zeros(numel);
    auto shared_full = allocated(numel), shared_part = allocated(numel / n);
    std::vector<at::Tensor> list{full};
    const Case copy{"copy", [&] { other.copy_(full); }};
    measure("all_gather", bytes,
            {{"ours", [&] { group_->all_gather_into(full, part, "bench").wait(); }},
             {"shared", [&] { group_->all_gather_into(shared_full, part, "bench").wait(); }},
             {"c10d", [&] { peer_->_allgather_base(full, part)->wait(); }},
             copy});
    measure("reduce_scatter", bytes,
            {{"ours", [&] { group_->reduce_scatter(part, full, ReduceOp::kSum, "bench").wait(); }},
             {"shared", [&] { group_->reduce_scatter(shared_part, shared_full, ReduceOp::kSum, "bench").wait(); }},
             {"c10d", [&] { peer_->_reduce_scatter_base(part, full)->wait(); }},
             copy});
    measure("all_reduce", bytes,
            {{"ours", [&] { group_->all_reduce(full, ReduceOp::kSum, "bench").wait(); }},
             {"shared", [&] { group_->all_reduce(shared_full, ReduceOp::kSum, "bench").wait(); }},
             {"c10d", [&] { peer_->allreduce(list)->wait(); }},
             copy});
  }

  /// A float for each rank: sizes are multiples of it.
  int64_t smallest() const { return kItemBytes * group_->size(); }

  void run_barriers() {
    measure("barrier", 0, {{"ours", [&] { group_->barrier("bench"); }}, {"c10d", [&] { peer_->barrier()->wait(); }}});
  }

 private:
  // Of which sums of sums do not end in infinity; written, so that the pages are there.
  static at::Tensor zeros(int64_t numel) { return at::empty({numel}).zero_(); }

  at::Tensor allocated(int64_t numel) {
    auto memory = std::make_shared<c10::DataPtr>(group_->allocate(kItemBytes * numel));
    return at::from_blob(
               memory->get(), {numel}, [memory](void*) {}, at::kFloat)
        .zero_();
  }

  void measure(const char* name, int64_t bytes, std::vector<Case> cases) {
    const int turns = bytes > (8 << 20) ? iterations_ / 5 + 1 : iterations_;
    const int calls = bytes <= (64 << 10) ? kShortCallsOfATurn : 1;
    for (int turn = -2; turn < turns; ++turn) {
      for (auto& one : cases) {
        const double seconds = seconds_of(one, calls);
        if (turn >= 0) one.seconds.push_back(seconds);
      }
    }
    nlohmann::json line{{"collective", name}, {"bytes", bytes}, {"ranks", group_->size()}};
    for (auto& one : cases) line[one.name] = median_of_slowest(one.seconds);
    if (group_->rank() == 0) std::cout << line.dump() << std::endl;
  }

  // Of one call. Where it is of several in a row, another before them finds the caches and threads as the last case left them.
  double seconds_of(const Case& one, int calls) {
    if (calls > 1) one.run();
    group_->barrier("bench");
    const auto start = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call) one.run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
  }

  double median_of_slowest(const std::vector<double>& seconds) {
    auto times = at::zeros({static_cast<int64_t>(seconds.size())}, at::kDouble);
    std::copy(seconds.begin(), seconds.end(), times.mutable_data_ptr<double>());
    group_->all_reduce(times, ReduceOp::kMax, "times").wait();
    const auto* begin = times.const_data_ptr<double>();
    return tessera::benchmarks::median({begin, begin + times.numel()});
  }

  static constexpr int kShortCallsOfATurn = 20;
  static constexpr int64_t kItemBytes = 4;

  int iterations_;
  tessera::CommunicatorPtr group_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> peer_;
};

void run_rank() {
  tessera::init_process_group();
  Bench bench(absl::GetFlag(FLAGS_iterations));
  const auto smallest = bench.smallest();
  if (const int64_t bytes = absl::GetFlag(FLAGS_bytes)) {
    TORCH_CHECK(bytes % smallest == 0, "--bytes is ", bytes, ", but must be a multiple of ", smallest, ": a float for each rank");
    return bench.run(bytes);
  }
  for (const int64_t bytes : {64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20}) bench.run(at::round_up(bytes, smallest));
  bench.run_barriers();
}

} // namespace

int main(int argc, char** argv) {
  return examples::run_program("collectives_bench", [&] {
    examples::parse_command_line(argc, argv, "measures collectives", "collectives_bench.cpp");
    examples::check_at_least("ranks", absl::GetFlag(FLAGS_ranks), 0);
    examples::check_at_least("iterations", absl::GetFlag(FLAGS_iterations), 1);
    TORCH_CHECK(absl::GetFlag(FLAGS_bytes) >= 0, "--bytes is ", absl::GetFlag(FLAGS_bytes), ", but must be at least 0");
    return examples::run_ranks(absl::GetFlag(FLAGS_ranks), run_rank);
  });
}
