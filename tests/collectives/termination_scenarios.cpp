// Scenarios of rank_program in which SIGTERM comes to the program that started the ranks, or to all of its processes.
#include "rank_scenarios.h"

#include <ATen/ops/full.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

namespace tessera::testing {

namespace {

volatile std::sig_atomic_t is_asked_to_end = 0;

void note_signal(int /*signal*/) { is_asked_to_end = 1; }

void wait_for_signal() {
  while (is_asked_to_end == 0) usleep(1000);
}

void exit_as_ended_without_it(World& world) {
  world.group->barrier("of all that end");
  _exit(128 + SIGTERM);
}

// The first rank sends it when all have said that they are ready; no collective is under way then.
void send_once_all_are_ready(const World& world) {
  const auto store = world.context.store();
  const auto key = [](int rank) { return "ready/" + std::to_string(rank); };
  store->set(key(world.rank()), "");
  if (world.rank() != 0) return;
  for (int rank = 0; rank <= world.last(); ++rank) store->wait({key(rank)});
  const char* to_all = std::getenv("RANK_PROGRAM_SIGNALS_ALL");
  kill(to_all != nullptr ? 0 : getppid(), SIGTERM);
}

void say_saved(const World& world) {
  std::printf("rank %d of %d saved\n", world.rank(), world.group->size());
  std::fflush(stdout);
}

// A training loop that saves at the end of the step in which the signal came to some rank.
void save_together(World& world) {
  std::signal(SIGTERM, note_signal);
  send_once_all_are_ready(world);
  for (bool ends = false; !ends;) {
    auto asked = at::full({1}, static_cast<double>(is_asked_to_end));
    world.group->all_reduce(asked, ReduceOp::kMax, "asked to end").wait();
    ends = asked.item<double>() > 0;
  }
  say_saved(world);
}

void do_nothing_about_it(World& world) {
  send_once_all_are_ready(world);
  while (true) pause();
}

void last_does_nothing_about_it(World& world) {
  if (world.rank() == world.last()) return do_nothing_about_it(world);
  std::signal(SIGTERM, note_signal);
  send_once_all_are_ready(world);
  wait_for_signal();
  say_saved(world);
}

void never_end(World& world) {
  std::signal(SIGTERM, SIG_IGN);
  send_once_all_are_ready(world);
  while (true) pause();
}

// Whoever asks again wants no save.
void end_at_the_second(World& world) {
  static volatile std::sig_atomic_t signals = 0;
  std::signal(SIGTERM, [](int) { signals = signals + 1; });
  world.group->barrier("ready");
  while (signals < 2) {
    if (world.rank() == 0) kill(getppid(), SIGTERM);
    usleep(20'000);
  }
  std::printf("rank %d of %d had a second\n", world.rank(), world.group->size());
  std::fflush(stdout);
  _exit(128 + SIGTERM);
}

void last_fails_to_save(World& world) {
  std::signal(SIGTERM, note_signal);
  send_once_all_are_ready(world);
  wait_for_signal();
  if (world.rank() == world.last()) throw std::runtime_error("the disk is full");
  say_saved(world);
}

void last_misses_the_others(World& world) {
  if (world.rank() == world.last()) std::signal(SIGTERM, note_signal);
  send_once_all_are_ready(world);
  if (world.rank() == world.last()) world.group->barrier("of which the others die");
  while (true) pause();
}

void exit_as_ended_by_it(World& world) {
  std::signal(SIGTERM, [](int) { _exit(128 + SIGTERM); });
  send_once_all_are_ready(world);
  while (true) pause();
}

// The first rank sends it when the program that started them has said that the last one has ended.
void last_has_failed(World& world) {
  world.group->barrier("ready");
  if (world.rank() == world.last()) throw std::runtime_error("no more data");
  const auto port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  c10d::TCPStore store("127.0.0.1", c10d::TCPStoreOptions{.port = port, .waitWorkers = false});
  while (world.rank() == 0 && internal::ended_ranks(store).empty()) usleep(1000);
  if (world.rank() == 0) kill(getppid(), SIGTERM);
  while (true) pause();
}

void note_in_any_process(int /*signal*/) {
  constexpr char kText[] = "handled\n";
  [[maybe_unused]] const auto written = write(STDOUT_FILENO, kText, sizeof(kText) - 1);
  is_asked_to_end = 1;
}

const std::map<std::string, void (*)(World&)> kWays{
    {"save_together", save_together},
    {"do_nothing_about_it", do_nothing_about_it},
    {"last_does_nothing_about_it", last_does_nothing_about_it},
    {"never_end", never_end},
    {"end_at_the_second", end_at_the_second},
    {"last_fails_to_save", last_fails_to_save},
    {"last_misses_the_others", last_misses_the_others},
    {"exit_as_ended_by_it", exit_as_ended_by_it},
    {"exit_as_ended_without_it", exit_as_ended_without_it},
    {"last_has_failed", last_has_failed},
};

} // namespace

void ends_by_signal(const std::string& how) {
  if (how == "before_all_have_started") {
    if (std::getenv("RANK") == std::string("0")) kill(getppid(), SIGTERM);
    while (true) pause();
  }
  init_process_group();
  World world;
  kWays.at(how)(world);
}

int launch_with_a_handler(int ranks) {
  std::signal(SIGTERM, note_in_any_process);
  const int status = launch(ranks, [] {
    init_process_group();
    World world;
    send_once_all_are_ready(world);
    wait_for_signal();
    say_saved(world);
  });
  if (is_launched_rank()) return status;
  is_asked_to_end = 0;
  raise(SIGTERM);
  std::printf("the program's handler is %sin force\n", is_asked_to_end == 0 ? "not " : "");
  return status;
}

int launch_where_it_is_ignored(int ranks) {
  std::signal(SIGTERM, SIG_IGN);
  return launch(ranks, [] {
    init_process_group();
    World world;
    send_once_all_are_ready(world);
    say_saved(world);
  });
}

} // namespace tessera::testing
