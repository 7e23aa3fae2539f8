// Scenarios of rank_program in which ranks write what they recorded.
#include "rank_scenarios.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace tessera::testing {

namespace {

std::string trace_of(int rank) {
  std::ifstream file(std::string(std::getenv("TESSERA_TRACE_FOLDER")) + "/rank-" + std::to_string(rank) + ".json");
  return {std::istreambuf_iterator<char>(file), {}};
}

bool says_that_it_hangs(const std::string& trace) {
  const auto call = trace.find("\"label\":\"the hang\"");
  return call != std::string::npos && trace.find("\"state\":\"awaited\"", call) != std::string::npos;
}

} // namespace

void is_traced_in_a_hang() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) {
    const auto has_written = [&](int rank) {
      return rank == world.last() ? !trace_of(rank).empty() : says_that_it_hangs(trace_of(rank));
    };
    for (int rank = 0; rank <= world.last(); ++rank) {
      while (!has_written(rank)) {
        kill(getppid(), SIGUSR1);
        usleep(10'000);
      }
    }
    const std::filesystem::path folder(std::getenv("TESSERA_TRACE_FOLDER"));
    std::filesystem::create_directory(folder / "hang"); // a signal on its way may change the files when this rank has come
    for (int rank = 0; rank <= world.last(); ++rank) {
      const auto name = "rank-" + std::to_string(rank) + ".json";
      std::filesystem::copy_file(folder / name, folder / "hang" / name);
    }
  }
  auto tensor = at::ones({10});
  world.group->all_reduce(tensor, ReduceOp::kSum, "the hang").wait();
  TORCH_CHECK(tensor.eq(world.group->size()).all().item<bool>());
}

void signal_while_others_join() {
  const auto file = std::string(std::getenv("TESSERA_TRACE_FOLDER")) + "/rank 0 joins";
  if (std::atoi(std::getenv("RANK")) == 0) std::ofstream(file).put('\n');
  if (std::atoi(std::getenv("RANK")) != 1) return;
  while (!std::filesystem::exists(file)) usleep(1000);
  for (int time = 0; time < 20; ++time) {
    kill(getppid(), SIGUSR1);
    usleep(10'000);
  }
}

void last_rank_sees_the_others_fail() {
  World world;
  const auto store = world.context.store();
  const auto key = [](int rank) { return "failed/" + std::to_string(rank); };
  world.group->barrier("together");
  if (world.rank() == world.last()) {
    for (int rank = 0; rank < world.last(); ++rank) store->wait({key(rank)}, std::chrono::minutes(1));
    return;
  }
  try {
    world.group->barrier("the last rank does not come");
  } catch (const std::exception&) {
    store->set(key(world.rank()), "");
    throw;
  }
}

void forked_child_is_signalled() {
  World world;
  world.group->barrier("together");
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGUSR1);
    std::exit(0);
  }
  int status = -1;
  TORCH_CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with status ", status);
  destroy_process_group(); // nothing is written after it
}

} // namespace tessera::testing
