// The scenario of rank_program in which a random rank fails in a random way at a random moment of random collectives.
#include "rank_scenarios.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <regex>
#include <string>
#include <thread>

namespace tessera::testing {

namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr const char* kTimeKey = "when the victim failed";

/// Of the clock that the processes of a host share.
int64_t now_us() { return std::chrono::duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count(); }

/// What happens in a run. Every rank draws the same.
struct Plan {
  Plan(uint32_t seed, const std::string& how, int ranks) : random(seed), how(how) {
    victim = static_cast<int>(random() % static_cast<uint32_t>(ranks));
    moment = microseconds(random() % 30'000);
    odd_call = static_cast<int>(random() % 100);
  }
  std::mt19937 random; ///< for the calls that follow
  std::string how;     ///< killed, stopped, throws, hangs or out-of-step
  int victim;
  microseconds moment; ///< of a signal, after the first barrier
  int odd_call;        ///< before which the victim throws, hangs or calls something else
};

/// The groups of a run and the calls on them, in an order that is the same on every rank.
class RandomCalls {
 public:
  RandomCalls(World& world, Plan& plan) : world_(world), random_(plan.random) {}

  void call() {
    const auto members = draw_members();
    const auto kind = random_() % 6;
    const auto numel = static_cast<int64_t>(random_() % 3 == 0 ? random_() % 100'000 : random_() % 50);
    const auto purpose = c10::str("purpose ", calls_++ / 40);
    if (std::find(members.begin(), members.end(), world_.rank()) == members.end()) return;
    auto& group = *world_.context.communicator(members, at::kCPU, purpose);
    const auto part = at::ones({numel}), whole = at::zeros({numel * group.size()});
    switch (kind) {
      case 0: return group.barrier("random barrier");
      case 1: return group.all_reduce(part, ReduceOp::kSum, "random sum").wait();
      case 2: return group.all_gather_into(whole, part, "random gather").wait();
      case 3: return group.reduce_scatter(part, whole, ReduceOp::kSum, "random reduction").wait();
      case 4: return group.broadcast(part, group.size() - 1, "random broadcast").wait();
      default: return group.all_to_all(at::zeros_like(whole), whole, {}, {}, "random exchange").wait();
    }
  }

 private:
  /// Half of the calls are of all ranks, the others of those that a rank's draw leaves in, at least two.
  std::vector<int64_t> draw_members() {
    auto members = ranks_up_to(world_.last() + 1);
    const auto without = random_() % (2 * members.size());
    if (members.size() > 2 && without < members.size()) members.erase(members.begin() + static_cast<std::ptrdiff_t>(without));
    return members;
  }

  World& world_;
  std::mt19937& random_;
  int calls_ = 0;
};

[[noreturn]] void fail_for_ever() {
  while (true) pause();
}

void fail_between_calls(World& world, const std::string& how) {
  world.context.store()->set(kTimeKey, std::to_string(now_us()));
  if (how == "throws") TORCH_CHECK(false, "no more data");
  if (how == "hangs") fail_for_ever();
  world.group->broadcast(at::ones({7}), 0, "out of step").wait();
}

void fail_by_signal(World& world, const Plan& plan) {
  std::this_thread::sleep_for(plan.moment);
  world.context.store()->set(kTimeKey, std::to_string(now_us()));
  raise(plan.how == "killed" ? SIGKILL : SIGSTOP);
}

} // namespace

void random_failure(const std::string& how, uint32_t seed) {
  World world;
  Plan plan(seed, how, world.last() + 1);
  RandomCalls calls(world, plan);
  const bool by_signal = how == "killed" || how == "stopped", is_victim = world.rank() == plan.victim;
  world.group->barrier("together");
  if (is_victim && by_signal) std::thread(fail_by_signal, std::ref(world), std::cref(plan)).detach();
  try {
    for (int call = 0;; ++call) {
      if (is_victim && !by_signal && call == plan.odd_call) fail_between_calls(world, how);
      calls.call();
    }
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const bool is_named = std::regex_search(text, std::regex(c10::str("ranks? ([0-9]+, )*", plan.victim, "\\b"))); // or in a list
    TORCH_CHECK(world.context.store()->check({kTimeKey}), "rank ", world.rank(), " failed before the victim: ", text);
    const auto after = now_us() - std::atoll(world.context.store()->get_to_str(kTimeKey).c_str());
    if (!is_victim)
      std::printf("rank %d %s rank %d after %lld us\n", world.rank(), is_named ? "names" : "misses", plan.victim,
                  static_cast<long long>(after));
    std::fflush(stdout);
    throw;
  }
}

} // namespace tessera::testing
