// Rank 0 waits for rank 1, which waits for the last rank from a later time on.
#include "rank_scenarios.h"

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

namespace tessera::testing {

namespace {

constexpr std::chrono::milliseconds kLater(1500);

using Deed = std::function<void(World&, const CommunicatorPtr& behind)>;

void wait_in_a_row(
    const Deed& wait_behind, const Deed& do_of_last = [](World&, const CommunicatorPtr&) {}) {
  World world;
  const auto group_of = [&](int64_t a, int64_t b) { return world.context.communicator(std::vector<int64_t>{a, b}, at::kCPU); };
  const auto front = world.rank() < 2 ? group_of(0, 1) : nullptr;
  const auto behind = world.rank() > 0 ? group_of(1, 2) : nullptr;
  world.group->barrier("together");
  if (world.rank() == 0) front->barrier("front");
  if (world.rank() == 1) {
    std::this_thread::sleep_for(kLater);
    wait_behind(world, behind);
  }
  if (world.rank() == world.last()) do_of_last(world, behind);
  while (true) pause();
}

void make_another(World& world, const CommunicatorPtr&) {
  world.context.communicator(std::vector<int64_t>{1, 2}, at::kCPU, "another");
}

} // namespace

void rank_1_waits_later_in_a_collective() {
  wait_in_a_row([](World&, const CommunicatorPtr& behind) { behind->barrier("behind"); });
}

void rank_1_waits_later_for_a_group() { wait_in_a_row(make_another); }

void rank_1_waits_later_for_the_end_of_a_meeting() {
  wait_in_a_row(make_another, [](World& world, const CommunicatorPtr& behind) {
    std::thread([store = world.context.store()] {
      while (!store->check({"group/CPU/another/1_2/arrived/2"})) usleep(1000); // a wait would keep the store to itself
      raise(SIGSTOP);
    }).detach();
    make_another(world, behind);
  });
}

void rank_1_is_killed_while_it_waits() {
  wait_in_a_row([](World&, const CommunicatorPtr& behind) {
    std::thread([] {
      std::this_thread::sleep_for(kLater);
      raise(SIGKILL);
    }).detach();
    behind->barrier("behind");
  });
}

void rank_0_polls_what_comes_late() {
  World world;
  const auto store = world.context.store();
  const auto says_that_it_waits = [&] { return store->check({"missed_by/0"}) && store->get_to_str("missed_by/0") != "-"; };
  world.group->barrier("together");
  while (world.rank() == 1 && !says_that_it_waits()) usleep(1000);
  auto tensor = at::ones({10});
  auto work = world.group->all_reduce(tensor, ReduceOp::kSum, "late");
  if (world.rank() != 0) return work.wait();
  while (!work.is_completed()) usleep(1000);
  while (says_that_it_waits()) usleep(10'000); // until the test kills it
}

} // namespace tessera::testing
