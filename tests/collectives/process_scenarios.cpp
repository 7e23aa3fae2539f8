// Scenarios of rank_program in which a rank forks, or joins one job after another.
#include "rank_scenarios.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace tessera::testing {

void sums() {
  World world;
  auto tensor = at::ones({1000});
  world.group->all_reduce(tensor, ReduceOp::kSum, "sums").wait();
  TORCH_CHECK(tensor.eq(world.group->size()).all().item<bool>());
  std::printf("rank %d of %d done\n", world.rank(), world.group->size());
}

std::string message_of(const std::exception& error) {
  const auto* with_stack = dynamic_cast<const c10::Error*>(&error);
  return with_stack != nullptr ? with_stack->what_without_backtrace() : error.what();
}

void forked_child_uses_the_group() {
  World world;
  world.group->barrier("together");
  auto tensor = at::ones({50'000});
  auto pending = world.group->all_reduce(tensor, ReduceOp::kSum, "before the fork");
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { world.group->barrier("in the child"); }, [&] { pending.wait(); }, [] { process_context(); },
             [&] { world.context.communicator(world.group->ranks(), at::kCPU, "new"); }}) {
      try {
        use();
      } catch (const std::exception& error) {
        std::printf("child: %s\n", message_of(error).c_str());
      }
    }
    std::exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  pending.wait();
  TORCH_CHECK(status == 0 && tensor.eq(world.group->size()).all().item<bool>());
  sums();
}

void forked_child_drops_a_destroyed_group() {
  auto& context = process_context();
  const int rank = context.rank(), ranks = context.world_size();
  auto group = context.communicator(ranks_up_to(ranks), at::kCPU);
  auto tensor = at::ones({50'000});
  auto pending = group->all_reduce(tensor, ReduceOp::kSum, "before the fork");
  destroy_process_group();
  const pid_t child = fork();
  if (child == 0) {
    pending = {};
    group.reset();
    std::exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  pending.wait();
  TORCH_CHECK(status == 0 && tensor.eq(ranks).all().item<bool>());
  std::printf("rank %d of %d done\n", rank, ranks);
}

namespace {

int64_t from_rank_0(const World& world, int64_t number) {
  const auto chosen = at::full({1}, number, at::kLong);
  world.group->broadcast(chosen, 0, "number").wait();
  return chosen.item<int64_t>();
}

} // namespace

void joins_with_a_store_of_its_own() {
  c10::intrusive_ptr<c10d::TCPStore> store;
  int rank = 0, ranks = 0;
  {
    const World world;
    rank = world.last() - world.rank();
    ranks = world.group->size();
    c10d::TCPStoreOptions options{.port = 0, .isServer = true, .waitWorkers = false, .timeout = std::chrono::seconds(77)};
    if (world.rank() == 0) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    options.port = static_cast<uint16_t>(from_rank_0(world, store ? store->getPort() : 0));
    options.isServer = false;
    if (!store) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  destroy_process_group();
  setenv("LOCAL_RANK", "5", 1);
  const auto end = "end of " + std::to_string(rank);
  std::thread waits([&] { store->wait({end}, std::chrono::minutes(2)); });
  for (int job = 0; job < 2; ++job) {
    init_process_group({.own_store = OwnStore{store, rank, ranks}});
    TORCH_CHECK(process_context().rank() == rank && process_context().local_rank() == 5);
    sums();
    if (job == 0) destroy_process_group();
  }
  store->clone()->set(end, "");
  waits.join();
  TORCH_CHECK(store->getTimeout() == std::chrono::seconds(77));
  World().group->barrier("none needs the store any more");
}

void joins_job_after_job() {
  int64_t port = 0;
  {
    const World world;
    if (world.rank() == 0) port = c10d::TCPStore("127.0.0.1", {.port = 0, .isServer = true}).getPort(); // free again
    port = from_rank_0(world, port);
  }
  destroy_process_group();
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  std::vector<CommunicatorPtr> kept;
  for (int job = 0; job < 3; ++job) {
    init_process_group();
    sums();
    kept.push_back(World().group);
    if (process_context().rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    destroy_process_group();
  }
  init_process_group();
}

void join_a_job_alone() {
  std::map<std::string, std::string> ours;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    ours[name] = std::getenv(name);
    unsetenv(name);
  }
  init_process_group();
  destroy_process_group();
  for (const auto& [name, value] : ours) setenv(name.c_str(), value.c_str(), 1);
}

void fail_to_join() {
  constexpr int kLimit = 256, kLeft = 12; // enough to meet the others, and too few to watch them
  const rlimit limit{kLimit, kLimit};
  TORCH_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  std::vector<int> taken;
  while (taken.empty() || taken.back() < kLimit - kLeft) {
    taken.push_back(dup(0));
    TORCH_CHECK(taken.back() >= 0);
  }
  try {
    init_process_group();
  } catch (const std::exception& error) {
    std::printf("%s\n", message_of(error).c_str());
  }
  for (const int descriptor : taken) close(descriptor);
}

void programs_end_at_a_broken_pipe() {
  destroy_process_group();
  std::signal(SIGPIPE, SIG_DFL);
  init_process_group();
  const int status = std::system("kill -s PIPE $$");
  TORCH_CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE, "the program ended with status ", status);
  sums();
}

void says_how_many_are_here() {
  std::printf("rank %d is one of %d on its host\n", process_context().rank(), process_context().local_world_size());
}

} // namespace tessera::testing
