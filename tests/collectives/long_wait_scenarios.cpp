// Rank 0 waits for rank 1, which waits for the last rank from a later time on.
#include "rank_scenarios.h"

#include <tessera/collectives/process_context.h>

#include <unistd.h>
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

namespace tessera::testing {

namespace {

constexpr std::chrono::milliseconds kLater(1500);

void wait_in_a_row(const std::function<void(World&, const CommunicatorPtr& behind)>& wait_behind) {
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
  while (true) pause();
}

} // namespace

void rank_1_waits_later_in_a_collective() {
  wait_in_a_row([](World&, const CommunicatorPtr& behind) { behind->barrier("behind"); });
}

void rank_1_waits_later_for_a_group() {
  wait_in_a_row([](World& world, const CommunicatorPtr&) {
    world.context.communicator(std::vector<int64_t>{1, 2}, at::kCPU, "another");
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

} // namespace tessera::testing
