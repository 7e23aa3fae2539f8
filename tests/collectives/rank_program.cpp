// A program for the tests of launch and failures: rank_program SCENARIO --ranks n
#include "rank_scenarios.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/record_error.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

// Stands before libc's: with RANK_PROGRAM_HOSTS=0011 ranks 2 and 3 are on another host than 0 and 1, and do not see their
// processes.
extern "C" __attribute__((visibility("default"))) int gethostname(char* name, size_t size) noexcept {
  const char *hosts = std::getenv("RANK_PROGRAM_HOSTS"), *rank = std::getenv("RANK");
  utsname system = {};
  uname(&system);
  if (hosts != nullptr && rank != nullptr)
    std::snprintf(name, size, "host%c", hosts[std::atoi(rank)]);
  else
    std::snprintf(name, size, "%s", system.nodename);
  return 0;
}

namespace {

using tessera::ReduceOp;
using tessera::testing::message_of;
using tessera::testing::ranks_up_to;
using tessera::testing::sums;
using tessera::testing::World;

// Not terminated by itself: only a signal ends it.
[[noreturn]] void block_forever() {
  while (true) pause();
}

// Groups that lie differently on two hosts with two ranks each: which of them have memory that ranks share.
void transport() {
  World world;
  const auto& ranks = world.group->ranks();
  const int64_t own = world.rank(), neighbour = own ^ 1, counterpart = own ^ 2;
  for (const auto& group :
       {ranks, {std::min(own, neighbour), std::max(own, neighbour)}, {std::min(own, counterpart), std::max(own, counterpart)}}) {
    const auto communicator = world.context.communicator(group, at::kCPU, "transport");
    communicator->barrier("together");
    const auto memory = communicator->allocate(1 << 20);
    std::string line, shared;
    for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
      std::uintptr_t begin = 0, end = 0;
      char rights[5] = {};
      if (std::sscanf(line.c_str(), "%zx-%zx %4s", &begin, &end, rights) != 3) continue;
      const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
      if (begin <= address && address < end) shared = rights[3] == 's' ? "" : "no ";
    }
    std::printf("of ranks [%s] allocates %smemory that ranks share\n", c10::Join(", ", group).c_str(), shared.c_str());
  }
}

// The ranks whose numbers `which` has may write files of 1 MiB, so that they share no memory.
void small_files() {
  const rlimit limit{1 << 20, RLIM_INFINITY};
  const char* which = std::getenv("RANK_PROGRAM_SMALL_FILES");
  if (std::string(which).find(std::getenv("RANK")) != std::string::npos) setrlimit(RLIMIT_FSIZE, &limit);
  World world;
  world.context.communicator(world.group->ranks(), at::kCPU, "another")->barrier("another");
  sums();
}

void closed_streams_are_null() {
  World world;
  for (const char* stream : {"/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"})
    TORCH_CHECK(std::filesystem::read_symlink(stream) == "/dev/null", stream);
  sums();
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

// The last rank dies or stops while its payload is half sent: the others have its header and a part of the data.
void ends_in_the_middle_of_an_all_gather(const std::function<void()>& end, int64_t numel = 64 << 20) {
  World world;
  auto output = at::zeros({world.group->size() * numel}, at::kByte), input = at::ones({numel}, at::kByte);
  world.group->barrier("together");
  auto work = world.group->all_gather_into(output, input, "big");
  if (world.rank() == world.last()) {
    // Its own output begins to fill: the transfer is under way.
    const auto* from_first = output.const_data_ptr<uint8_t>();
    while (*static_cast<const volatile uint8_t*>(from_first) == 0) {
    }
    end();
  }
  work.wait();
}

/// As where it has no memory for what it is to receive.
void last_rank_gives_up() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) return world.group->give_up("no memory");
  auto output = at::zeros({world.group->size() << 20}), input = at::ones({1 << 20});
  world.group->all_gather_into(output, input, "big").wait();
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

// ---------------------------------------------------------------- ranks that end, and the others notice later

// Prints how `call` fails. The survivors come one after another: each calls when the one before has failed, and may be gone.
void fail_in_turn(int dead, const std::function<void()>& call) {
  auto& context = tessera::process_context();
  const auto before = context.rank() - 1 == dead ? dead - 1 : context.rank() - 1;
  // Longer than the group's timeout, which the one before may have to wait for, and began to wait later.
  if (before >= 0) context.store()->wait({"failed/" + std::to_string(before)}, std::chrono::minutes(1));
  try {
    call();
  } catch (const std::exception& error) {
    std::printf("%s\n", message_of(error).c_str());
    context.store()->set("failed/" + std::to_string(context.rank()), "");
    throw;
  }
}

void die(const std::string& how) {
  if (how == "kill") raise(SIGKILL);
  if (how == "exit") std::exit(0);
  if (how == "_exit") _exit(0);
  throw std::runtime_error("boom");
}

bool is_rank_1() { return std::string(std::getenv("RANK")) == "1"; }

// dies/HOW/WHERE: rank 1 ends before the others do the next thing.
void rank_1_dies(const std::string& how, const std::string& where) {
  if (where == "join" && is_rank_1()) die(how);
  tessera::init_process_group();
  auto& context = tessera::process_context();
  const auto ranks = ranks_up_to(context.world_size());
  if (where != "first_group") context.communicator(ranks, at::kCPU)->barrier("together");
  if (is_rank_1()) die(how);
  fail_in_turn(1, [&] {
    if (where == "collective")
      context.communicator(ranks, at::kCPU)->barrier("late");
    else
      context.communicator(ranks, at::kCPU, where);
  });
}

// Another process has the last rank's open descriptors, or would have them if they were inherited, and outlives it.
void last_rank_leaves_a_process(bool runs_a_program) {
  World world;
  world.group->barrier("together");
  const auto store = world.context.store();
  if (world.rank() == world.last()) {
    const pid_t child = runs_a_program ? vfork() : fork();
    if (child == 0 && runs_a_program) execl("/bin/sleep", "sleep", "50", nullptr);
    if (child == 0) block_forever();
    store->set("child", std::to_string(child));
    raise(SIGKILL);
  }
  const pid_t child = std::atoi(store->get_to_str("child").c_str());
  try {
    world.group->barrier("waits for the last rank");
  } catch (const std::exception&) {
    std::printf("noticed while the process %s\n", kill(child, 0) == 0 ? "runs" : "has ended");
    std::fflush(stdout); // it may be ended before it has closed its connections
    kill(child, SIGKILL);
    throw;
  }
}

void last_rank_never_calls_and_others_follow() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) block_forever();
  fail_in_turn(world.last(), [&] { world.group->barrier("late"); });
}

// Prints how `call` fails, and goes on.
void print_failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    std::printf("%s\n", message_of(error).c_str());
  }
}

void wait_for_end(pid_t process) {
  while (kill(process, 0) == 0) usleep(1000);
}

// Of two collectives the last rank calls none, and rank 1 the first. Rank 0 waits for both, for the second not as long yet.
void last_rank_never_calls_and_rank_1_calls_one_of_two() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) block_forever();
  auto a = at::ones({10}), b = at::ones({10});
  auto first = world.group->all_reduce(a, ReduceOp::kSum, "first");
  if (world.rank() == 1) block_forever();
  auto second = world.group->all_reduce(b, ReduceOp::kSum, "second");
  std::thread longer([&] { print_failure([&] { first.wait(); }); });
  usleep(800'000);
  print_failure([&] { second.wait(); });
  longer.join();
  throw std::runtime_error("both failed");
}

// Rank 0 misses the last one, and is killed before it can record that. The others come later, and find both gone.
void last_rank_is_killed_and_then_rank_0() {
  World world;
  const auto store = world.context.store();
  store->set("pid/" + std::to_string(world.rank()), std::to_string(getpid()));
  world.group->barrier("together");
  auto tensor = at::ones({10});
  const pid_t first = std::atoi(store->get_to_str("pid/0").c_str());
  const pid_t last = std::atoi(store->get_to_str("pid/" + std::to_string(world.last())).c_str());
  if (world.rank() == world.last()) {
    store->wait({"called"});
    raise(SIGKILL);
  }
  if (world.rank() == 0) {
    auto work = world.group->all_reduce(tensor, ReduceOp::kSum, "sums");
    store->set("called", "");
    std::thread([last] {
      wait_for_end(last);
      usleep(300'000); // in the middle of the time that it leaves the last rank to say whom that missed
      raise(SIGKILL);
    }).detach();
    return work.wait();
  }
  wait_for_end(first);
  fail_in_turn(0, [&] { world.group->all_reduce(tensor, ReduceOp::kSum, "sums").wait(); });
}

// Rank 0, which hosts the store, is killed when it has sent its part. Rank 1 ends after it, and the last rank misses rank 1.
void the_stores_host_is_killed() {
  World world;
  const auto store = world.context.store();
  store->set("pid/" + std::to_string(world.rank()), std::to_string(getpid()));
  world.group->barrier("together");
  const pid_t host = std::atoi(store->get_to_str("pid/0").c_str()), other = std::atoi(store->get_to_str("pid/1").c_str());
  auto tensor = at::ones({10});
  if (world.rank() == 1) return wait_for_end(host);
  auto work = world.group->all_reduce(tensor, ReduceOp::kSum, "sums");
  store->add("called", 1);
  while (store->add("called", 0) != 2) usleep(1000);
  if (world.rank() == 0) {
    usleep(300'000); // the last rank has what it needs of this one
    raise(SIGKILL);
  }
  wait_for_end(other);
  work.wait();
}

// The last rank ends without a collective that rank 0 has started.
void nobody_waits_for_the_last_rank() {
  World world;
  world.group->barrier("together");
  const auto store = world.context.store();
  if (world.rank() == world.last()) {
    store->wait({"started"});
    _exit(0);
  }
  auto tensor = at::ones({10});
  auto work = world.group->all_reduce(tensor, ReduceOp::kSum, "polled");
  store->set("started", "");
  while (!work.is_completed()) usleep(1000);
  std::printf("%s when it had failed\n", store->check({"first_missing"}) ? "recorded" : "not recorded");
  print_failure([&] { work.wait(); });
  std::printf("%s when it was waited for\n", store->check({"first_missing"}) ? "recorded" : "not recorded");
}

std::atomic<bool> threads_are_held{false};

// Holds the thread that reads gloo's connections: the only one here that waits for events of descriptors.
void hold_the_reading_thread() {
  threads_are_held = true;
  std::signal(SIGUSR1, [](int) {
    const int error = errno;
    while (threads_are_held) usleep(1000);
    errno = error;
  });
  for (bool held = false; !held;) { // now and then it does not wait
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string call;
      std::ifstream(thread.path() / "wchan") >> call;
      if (call.find("ep_poll") == std::string::npos && call.find("epoll_wait") == std::string::npos) continue;
      held = syscall(SYS_tgkill, getpid(), std::atoi(thread.path().filename().c_str()), SIGUSR1) == 0 || held;
    }
  }
}

// The last rank has sent its part and ended, and for two seconds more the other one's thread that reads it gets no processor.
void last_rank_ends_and_the_reader_is_held() {
  World world;
  const auto store = world.context.store();
  if (world.rank() == world.last()) store->set("last", std::to_string(getpid()));
  world.group->barrier("together");
  auto tensor = world.rank() == world.last() ? at::ones({10}) : at::zeros({10});
  if (world.rank() == world.last()) {
    store->wait({"held"});
    return world.group->broadcast(tensor, world.last(), "last").wait();
  }
  const pid_t last = std::atoi(store->get_to_str("last").c_str());
  auto work = world.group->broadcast(tensor, world.last(), "last");
  hold_the_reading_thread();
  store->set("held", "");
  std::thread releases([&] {
    wait_for_end(last);
    usleep(2'000'000);
    threads_are_held = false;
  });
  print_failure([&] { work.wait(); });
  releases.join();
  TORCH_CHECK(tensor.eq(1).all().item<bool>(), "what the last rank sent did not come");
  std::printf("rank %d of %d done\n", world.rank(), world.group->size());
}

// Ranks that have done their part end in order, and those that remain go on without them.
void ranks_end_one_after_another(const std::string& how) {
  World world;
  auto& context = world.context;
  context.store()->set("process/of/" + std::to_string(world.rank()), std::to_string(getpid()));
  world.group->barrier("together");
  for (int remaining = world.group->size() - 1; remaining >= 1 && world.rank() < remaining; --remaining) {
    const pid_t gone = std::atoi(context.store()->get_to_str("process/of/" + std::to_string(remaining)).c_str());
    wait_for_end(gone);
    const auto group = context.communicator(ranks_up_to(remaining), at::kCPU, "those that remain");
    auto tensor = at::ones({100000});
    group->all_reduce(tensor, ReduceOp::kSum, "sums").wait();
    TORCH_CHECK(tensor.eq(remaining).all().item<bool>());
  }
  std::printf("rank %d of %d done\n", world.rank(), world.group->size());
  std::fflush(stdout);
  if (how == "destroy") tessera::destroy_process_group();
  if (how == "exit") std::exit(0);
  if (how == "_exit") _exit(0);
}

void last_rank_stops() {
  World world;
  world.group->barrier("together");
  if (world.rank() == world.last()) raise(SIGSTOP);
  tessera::destroy_process_group();
}

// The last rank may open a few descriptors more, and `hard` says whether it may raise that limit.
void few_descriptors(bool hard) {
  World world;
  world.group->barrier("together");
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (world.rank() == world.last()) {
    const int next = dup(0); // the lowest that is free
    close(next);
    limit.rlim_cur = static_cast<rlim_t>(next) + 2;
    if (hard) limit.rlim_max = limit.rlim_cur;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
  try {
    world.context.communicator(world.group->ranks(), at::kCPU, "more")->barrier("more");
  } catch (const c10::DistError&) {
    if (world.rank() == world.last()) std::printf("taken for the fault of another rank\n");
    throw;
  }
  std::printf("rank %d of %d done\n", world.rank(), world.group->size());
}

void last_rank_is_killed_in_two_jobs() {
  const World world;
  const char* const restart = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (world.rank() == world.last() && std::atoi(restart) < 2) raise(SIGKILL);
  sums();
}

void last_of_more_than_two_ranks_throws() {
  const World world;
  if (world.group->size() > 2 && world.rank() == world.last()) throw std::runtime_error("no device");
  sums();
}

/// RANK_PROGRAM_RESTARTS=<most>,<fewest ranks>
void take_restarts(tessera::LaunchOptions& options) {
  const char* const restarts = std::getenv("RANK_PROGRAM_RESTARTS");
  if (restarts == nullptr) return;
  std::sscanf(restarts, "%d,%d", &options.max_restarts, &options.min_ranks);
  options.on_restart = [](const tessera::Restart& restart) {
    std::printf("restart %d with %d ranks: %s\n", restart.number, restart.ranks, restart.failure.c_str());
    std::fflush(stdout);
    if (std::getenv("RANK_PROGRAM_ENDS_BEFORE_RESTART") != nullptr) raise(SIGTERM);
  };
}

const std::map<std::string, std::function<void()>> kScenarios{
    {"sums", sums},
    {"joins_with_a_store_of_its_own", tessera::testing::joins_with_a_store_of_its_own},
    {"joins_job_after_job", tessera::testing::joins_job_after_job},
    {"rank_1_was_in_a_job_before", sums},
    {"a_rank_joins_at_its_second_try", sums},
    {"programs_end_at_a_broken_pipe", tessera::testing::programs_end_at_a_broken_pipe},
    {"says_how_many_are_here", tessera::testing::says_how_many_are_here},
    {"is_signalled_while_ranks_join", sums},
    {"rank_0_polls_what_comes_late", tessera::testing::rank_0_polls_what_comes_late},
    {"small_files", small_files},
    {"threads", threads},
    {"closed_streams_are_null", closed_streams_are_null},
    {"last_rank_throws", last_rank_throws},
    {"last_rank_is_killed", last_rank_is_killed},
    {"last_rank_is_killed_in_two_jobs", last_rank_is_killed_in_two_jobs},
    {"last_of_more_than_two_ranks_throws", last_of_more_than_two_ranks_throws},
    {"transport", transport},
    {"cut_off_in_the_middle_of_an_all_gather",
     [] { ends_in_the_middle_of_an_all_gather([] { TORCH_CHECK(std::system("ip link set dev eth0 down") == 0); }, 16 << 20); }},
    {"killed_in_the_middle_of_an_all_gather", [] { ends_in_the_middle_of_an_all_gather([] { raise(SIGKILL); }); }},
    {"stopped_in_the_middle_of_an_all_gather", [] { ends_in_the_middle_of_an_all_gather([] { raise(SIGSTOP); }); }},
    {"last_rank_never_calls", last_rank_never_calls},
    {"last_rank_exits_quietly", last_rank_exits_quietly},
    {"different_operations", different_operations},
    {"different_sizes", different_sizes},
    {"orders_of_ranks_differ", orders_of_ranks_differ},
    {"last_rank_leaves_a_program", [] { last_rank_leaves_a_process(true); }},
    {"last_rank_leaves_a_fork", [] { last_rank_leaves_a_process(false); }},
    {"last_rank_never_calls_and_others_follow", last_rank_never_calls_and_others_follow},
    {"makes_a_group_and_ends", [] { World(); }},
    {"ranks_return_one_after_another", [] { ranks_end_one_after_another("return"); }},
    {"ranks_destroy_one_after_another", [] { ranks_end_one_after_another("destroy"); }},
    {"ranks_exit_one_after_another", [] { ranks_end_one_after_another("exit"); }},
    {"ranks__exit_one_after_another", [] { ranks_end_one_after_another("_exit"); }},
    {"last_rank_stops", last_rank_stops},
    {"few_descriptors", [] { few_descriptors(false); }},
    {"too_few_descriptors", [] { few_descriptors(true); }},
    {"forked_child_uses_the_group", tessera::testing::forked_child_uses_the_group},
    {"forked_child_drops_a_destroyed_group", tessera::testing::forked_child_drops_a_destroyed_group},
    {"last_rank_never_calls_and_rank_1_calls_one_of_two", last_rank_never_calls_and_rank_1_calls_one_of_two},
    {"last_rank_is_killed_and_then_rank_0", last_rank_is_killed_and_then_rank_0},
    {"the_stores_host_is_killed", the_stores_host_is_killed},
    {"last_rank_gives_up", last_rank_gives_up},
    {"nobody_waits_for_the_last_rank", nobody_waits_for_the_last_rank},
    {"is_traced_in_a_hang", tessera::testing::is_traced_in_a_hang},
    {"last_rank_sees_the_others_fail", tessera::testing::last_rank_sees_the_others_fail},
    {"forked_child_is_signalled", tessera::testing::forked_child_is_signalled},
    {"rank_1_waits_later_in_a_collective", tessera::testing::rank_1_waits_later_in_a_collective},
    {"rank_1_waits_later_for_a_group", tessera::testing::rank_1_waits_later_for_a_group},
    {"rank_1_waits_later_for_the_end_of_a_meeting", tessera::testing::rank_1_waits_later_for_the_end_of_a_meeting},
    {"rank_1_is_killed_while_it_waits", tessera::testing::rank_1_is_killed_while_it_waits},
    {"strangers_on_every_port", tessera::testing::strangers_on_every_port},
    {"last_rank_ends_and_the_reader_is_held", last_rank_ends_and_the_reader_is_held},
};

void run(const std::string& scenario) {
  if (constexpr std::string_view kRecorded = "recorded/"; scenario.starts_with(kRecorded))
    return tessera::record([&] { run(scenario.substr(kRecorded.size())); });
  if (scenario == "last_rank_throws_where_its_end_is_ignored") return run("last_rank_throws");
  if (scenario == "every_rank_throws") throw std::runtime_error("nothing to do");
  if (scenario == "rank_1_never_joins" && is_rank_1()) block_forever();
  if (scenario == "rank_1_was_in_a_job_before" && is_rank_1()) tessera::testing::join_a_job_alone();
  if (const char* failing = std::getenv("RANK_PROGRAM_FAILS_TO_JOIN"); failing && std::string(failing) == std::getenv("RANK"))
    tessera::testing::fail_to_join();
  if (scenario == "is_signalled_while_ranks_join") tessera::testing::signal_while_others_join();
  if (constexpr std::string_view kSignal = "ends_by_signal/"; scenario.starts_with(kSignal))
    return tessera::testing::ends_by_signal(scenario.substr(kSignal.size()));
  if (scenario.starts_with("dies/")) {
    const auto end_of_how = scenario.find('/', 5);
    return rank_1_dies(scenario.substr(5, end_of_how - 5), scenario.substr(end_of_how + 1));
  }
  if (const char* rank = std::getenv("RANK"))
    if (const char* own = std::getenv((std::string("RANK_PROGRAM_TRANSPORT_") + rank).c_str()))
      setenv("TESSERA_TRANSPORT", own, 1);
  tessera::init_process_group();
  if (constexpr std::string_view kRandom = "random_failure/"; scenario.starts_with(kRandom)) {
    const auto seed = scenario.find('/', kRandom.size());
    const auto how = scenario.substr(kRandom.size(), seed - kRandom.size());
    return tessera::testing::random_failure(how, static_cast<uint32_t>(std::stoul(scenario.substr(seed + 1))));
  }
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
    if (scenario == "run_main_throws") return tessera::run_main([]() -> int { throw std::runtime_error("no more data"); });
    if (scenario == "launch_with_a_handler") return tessera::testing::launch_with_a_handler(2);
    if (scenario == "launch_where_it_is_ignored") return tessera::testing::launch_where_it_is_ignored(2);
    if (scenario == "last_rank_throws_where_its_end_is_ignored") std::signal(SIGCHLD, SIG_IGN);
    tessera::LaunchOptions options;
    if (scenario.starts_with("dies/") || scenario.ends_with("_and_then_rank_0") || scenario.starts_with("killed_") ||
        std::getenv("TESSERA_TRACE_FOLDER") != nullptr)
      options.grace_seconds = 30;                                           // all survivors shall say what they noticed
    if (scenario == "every_rank_throws") options.grace_seconds = 300;       // of many ranks, of which some start late
    if (scenario.starts_with("stopped_")) options.grace_seconds = 10;       // and what is stopped says nothing
    if (scenario.starts_with("random_failure/")) options.grace_seconds = 4; // nor do some ranks here
    take_restarts(options);
    if (const auto ranks = tessera::ranks_from_args(argc, argv))
      return tessera::launch(
          *ranks, [&] { run(scenario); }, options);
    run(scenario); // alone, or started by torchrun
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return 1;
}
