// A program for the tests of launch and failures: rank_program SCENARIO --ranks n
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>

namespace {

using tessera::ReduceOp;

struct World {
  World() : context(tessera::process_context()) {
    std::vector<int64_t> ranks(context.world_size());
    std::iota(ranks.begin(), ranks.end(), 0);
    group = context.communicator(ranks, at::kCPU);
  }
  int rank() const { return context.rank(); }
  int last() const { return context.world_size() - 1; }

  tessera::ProcessContext& context;
  tessera::CommunicatorPtr group;
};

// Not terminated by itself: only a signal ends it.
[[noreturn]] void block_forever() {
  while (true) pause();
}

void sums() {
  World world;
  auto tensor = at::ones({1000});
  world.group->all_reduce(tensor, ReduceOp::kSum, "sums").wait();
  TORCH_CHECK(tensor.eq(world.group->size()).all().item<bool>());
  std::printf("rank %d of %d done\n", world.rank(), world.group->size());
}

void threads() {
  const char* threads = std::getenv("OMP_NUM_THREADS");
  std::printf("rank %d has OMP_NUM_THREADS=%s\n", tessera::process_context().rank(), threads ? threads : "unset");
}

void last_rank_throws() {
  World world;
  if (world.rank() == world.last()) throw std::runtime_error("no more data");
  world.group->barrier("waits for the last rank");
}

void last_rank_is_killed() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) raise(SIGKILL);
  world.group->barrier("waits for the last rank");
}

// The last rank dies while its payload is half sent: the others have its header and a part of the data.
void killed_in_the_middle_of_an_all_gather() {
  World world;
  const int64_t numel = 64 << 20;
  auto output = at::zeros({world.group->size() * numel}, at::kByte), input = at::ones({numel}, at::kByte);
  world.group->barrier("together");
  auto work = world.group->all_gather_into(output, input, "big");
  if (world.rank() == world.last()) {
    // Its own output begins to fill: the transfer is under way.
    const auto* from_first = output.const_data_ptr<uint8_t>();
    while (*static_cast<const volatile uint8_t*>(from_first) == 0) {
    }
    raise(SIGKILL);
  }
  work.wait();
}

// Rank 1 lists the same ranks in another order.
void orders_of_ranks_differ() {
  auto& context = tessera::process_context();
  std::vector<int64_t> ranks{0, 1, 2};
  if (context.rank() == 1) std::swap(ranks[1], ranks[2]);
  context.communicator(ranks, at::kCPU);
}

void last_rank_never_calls() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) block_forever();
  world.group->barrier("the last rank does not come");
}

void last_rank_exits_quietly() {
  World world;
  if (world.rank() == world.last()) std::exit(3);
  world.group->barrier("waits for the last rank");
}

void different_operations() {
  World world;
  auto tensor = at::ones({8});
  if (world.rank() == 0)
    world.group->broadcast(tensor, 0, "weights").wait();
  else
    world.group->all_reduce(tensor, ReduceOp::kSum, "loss").wait();
}

void different_sizes() {
  World world;
  auto tensor = at::ones({world.rank() == 0 ? 100 : 5000});
  world.group->all_reduce(tensor, ReduceOp::kSum, "loss").wait();
}

const std::map<std::string, std::function<void()>> kScenarios{
    {"sums", sums},
    {"threads", threads},
    {"last_rank_throws", last_rank_throws},
    {"last_rank_is_killed", last_rank_is_killed},
    {"killed_in_the_middle_of_an_all_gather", killed_in_the_middle_of_an_all_gather},
    {"last_rank_never_calls", last_rank_never_calls},
    {"last_rank_exits_quietly", last_rank_exits_quietly},
    {"different_operations", different_operations},
    {"different_sizes", different_sizes},
    {"orders_of_ranks_differ", orders_of_ranks_differ},
};

void run(const std::string& scenario) {
  if (scenario == "rank_1_never_joins" && std::string(std::getenv("RANK")) == "1") block_forever();
  tessera::init_process_group();
  if (const auto found = kScenarios.find(scenario); found != kScenarios.end()) found->second();
}

} // namespace

int main(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  try {
    if (scenario == "launch_after_init") {
      tessera::init_process_group();
      tessera::launch(2, [] {});
    }
    if (scenario == "launches_twice") {
      tessera::launch(2, [] {});
      tessera::launch(2, [] {});
    }
    if (scenario == "launches_another_number") return tessera::launch(tessera::is_launched_rank() ? 3 : 2, [] {});
    if (const auto ranks = tessera::ranks_from_args(argc, argv)) return tessera::launch(*ranks, [&] { run(scenario); });
    run(scenario); // alone, or started by torchrun
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}
