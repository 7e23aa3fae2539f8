#include <tessera/collectives/launch.h>

#include <tessera/base/descriptors.h>
#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/ranks/store_socket.h>
#include <tessera/collectives/start/launched_rank.h>
#include <tessera/collectives/start/launched_ranks.h>
#include <tessera/collectives/start/standard_streams.h>
#include <tessera/collectives/start/termination_watch.h>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <string_view>

namespace tessera::internal {

namespace {

constexpr int kMostRanks = 1024; // each costs a process and a thread

bool is_cuda_initialized() {
  if (!at::hasCUDA()) return false;
  const auto& hooks = at::detail::getCUDAHooks();
  for (int device = 0; device < hooks.deviceCount(); ++device)
    if (hooks.hasPrimaryContext(static_cast<c10::DeviceIndex>(device))) return true;
  return false;
}

void check_may_launch(int ranks) {
  TORCH_CHECK(ranks >= 1 && ranks <= kMostRanks, "launch: the number of ranks must be 1 to ", kMostRanks, ", not ", ranks);
  TORCH_CHECK(!is_initialized(), "launch: a process group is already up in this process; call launch before init_process_group");
  TORCH_CHECK(!is_cuda_initialized(), "launch: CUDA is already initialized in this process; call launch before any use of CUDA");
  for (const char* name : {"RANK", "WORLD_SIZE"})
    if (const char* value = std::getenv(name); value && *value)
      TORCH_CHECK(false, "launch: this process is already a rank of another launcher's job (", name, "=", value,
                  "); run the program alone, or without launch");
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) // of mpirun and srun
    if (const char* value = std::getenv(name); value && std::atoi(value) > 1)
      TORCH_CHECK(false, "launch: another launcher started this program ", value, " times (", name, "=", value,
                  "); run the program alone, or without launch");
}

/// Opens a store on a free port of the loopback address. Beside the ranks' connections this process has a few for itself.
c10::intrusive_ptr<c10d::Store> open_store(int ranks) try {
  gloo::reserve_descriptors(ranks + 8);
  const std::chrono::seconds timeout(timeout_seconds_or(300, current_environment()));
  const auto socket = listen_for_store("127.0.0.1", 0, StoreReach::kThisHost).value();
  const c10d::TCPStoreOptions options{
      .port = socket.port, .isServer = true, .waitWorkers = false, .timeout = timeout, .masterListenFd = socket.descriptor};
  return connect_within(timeout, [options] { return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options); });
} catch (const std::exception& error) {
  TORCH_CHECK(false, "launch: cannot open the store of its ranks at 127.0.0.1: ", error_text(error));
}

void check_restarts(int ranks, const LaunchOptions& options) {
  TORCH_CHECK(options.max_restarts >= 0, "launch: max_restarts is ", options.max_restarts, ", but must not be negative");
  TORCH_CHECK(options.min_ranks >= 0 && options.min_ranks <= ranks, "launch: min_ranks is ", options.min_ranks,
              ", but must be from 0 to the ", ranks, " ranks");
}

int run_with_restarts(int ranks, const LaunchOptions& options) {
  check_restarts(ranks, options);
  TerminationWatch terminations;
  for (int restart = 0;; ++restart) {
    const auto store = open_store(ranks);
    const LaunchedJob job{.ranks = ranks, .restart = restart};
    const auto end = run_launched_ranks(job, dynamic_cast<c10d::TCPStore&>(*store), terminations, options);
    if (!end.failure) return end.status;
    if (terminations.has_arrived() || restart == options.max_restarts) std::rethrow_exception(end.failure);
    if (options.min_ranks > 0) ranks = std::max(options.min_ranks, ranks - 1);
    if (options.on_restart) options.on_restart({.number = restart + 1, .ranks = ranks, .failure = error_text(end.failure)});
    if (terminations.has_arrived()) std::rethrow_exception(end.failure);
  }
}

} // namespace

} // namespace tessera::internal

namespace tessera {

bool is_launched_rank() { return internal::has_launch_pipe(); }

int launch(int ranks, const std::function<void()>& worker, const LaunchOptions& options) {
  if (is_launched_rank()) return internal::run_as_rank(ranks, worker);
  internal::check_may_launch(ranks);
  internal::open_standard_streams(); // the ranks inherit them
  return internal::run_with_restarts(ranks, options);
}

std::optional<int> ranks_from_args(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    std::string_view value(argv[i]);
    if (value == "--ranks") {
      TORCH_CHECK(i + 1 < argc, "--ranks needs a number");
      value = argv[i + 1];
    } else if (value.starts_with("--ranks=")) {
      value.remove_prefix(8);
    } else {
      continue;
    }
    int ranks = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), ranks);
    TORCH_CHECK(error == std::errc() && end == value.data() + value.size() && ranks >= 1, "--ranks ", value,
                " is not a positive number");
    return ranks;
  }
  return std::nullopt;
}

} // namespace tessera
