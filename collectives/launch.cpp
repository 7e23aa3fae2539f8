#include <tessera/collectives/launch.h>

#include <tessera/collectives/error_text.h>
#include <tessera/collectives/job_environment.h>
#include <tessera/collectives/job_trace.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/rank_watch.h>
#include <tessera/collectives/signal_watch.h>
#include <tessera/collectives/store_socket.h>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fcntl.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

namespace tessera::internal {

namespace {

constexpr const char* kPipeVariable = "TESSERA_LAUNCH_PIPE";
constexpr const char* kParentVariable = "TESSERA_LAUNCH_PARENT";
constexpr int kMostRanks = 1024; // each costs a process and a thread
constexpr int kNoRank = -1;

// What a rank that threw writes into the pipe, in one piece.
struct FailureRecord {
  int rank;
  bool consequence; ///< a connection was lost or timed out: another rank failed first
  int64_t nanoseconds;
  char text[3800];
};
static_assert(sizeof(FailureRecord) <= PIPE_BUF, "so that the ranks' records do not mix");

int64_t now_in_nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

// ---------------------------------------------------------------- in a rank

void report_failure(int pipe, const std::string& text, bool consequence) {
  FailureRecord record = {};
  record.rank = parse_job_environment(current_environment()).rank;
  record.consequence = consequence;
  record.nanoseconds = now_in_nanoseconds();
  std::strncpy(record.text, text.c_str(), sizeof(record.text) - 1);
  // When the parent is gone nobody is left to be told.
  [[maybe_unused]] const auto written = write(pipe, &record, sizeof(record));
}

// An error where the launcher died before this rank asked to die with it, and in a program that inherited a rank's variables.
void check_parent() {
  const char* parent = std::getenv(kParentVariable);
  TORCH_CHECK(parent != nullptr && std::to_string(getppid()) == parent, "launch: the environment describes a rank that process ",
              parent != nullptr ? parent : "?", " has started (", kPipeVariable,
              " is set), but that is not this process's parent. ",
              "Either it has ended, or the variables of a rank were passed on to another program");
}

// An error, which no status hides, where the program launches again: its first call runs in these ranks too.
void check_is_the_launch(int ranks, int pipe, bool is_first_call) try {
  TORCH_CHECK(is_first_call, "launch: called again in a rank; a program launches once, as the last thing that main does");
  const int world_size = parse_job_environment(current_environment()).world_size;
  TORCH_CHECK(ranks == world_size, "launch: asks for ", ranks, " ranks in one of ", world_size,
              ": every process of a program must come to the same call with the same number");
} catch (const c10::Error& error) {
  report_failure(pipe, error_text(error), false);
  throw;
}

/// SIGUSR1, from the parent to its ranks.
bool passes_signals_on() { return !trace_options(current_environment()).folder.empty(); }

// It is blocked from the start of the process, which it would end.
bool admit_passed_signal() try {
  if (!is_launched_rank() || !passes_signals_on()) return false;
  ignore_signal_without_watch();
  sigset_t passed;
  sigemptyset(&passed);
  sigaddset(&passed, SIGUSR1);
  return pthread_sigmask(SIG_UNBLOCK, &passed, nullptr) == 0;
} catch (const c10::Error&) { // of variables, which init_process_group tells
  return false;
}

// Before main: what the program blocks itself stays blocked.
[[maybe_unused]] const bool kIsSignalAdmitted = admit_passed_signal();

int run_as_rank(int ranks, const std::function<void()>& worker) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  check_parent();
  const int pipe = std::atoi(std::getenv(kPipeVariable));
  const int flags = fcntl(pipe, F_GETFD);
  const bool is_first_call = flags == -1 || (flags & FD_CLOEXEC) == 0; // inherited, and not marked by the next line yet
  fcntl(pipe, F_SETFD, FD_CLOEXEC);
  check_is_the_launch(ranks, pipe, is_first_call);
  try {
    worker();
    return 0;
  } catch (const c10::DistNetworkError& error) {
    report_failure(pipe, error_text(error), true);
  } catch (...) {
    report_failure(pipe, error_text(std::current_exception()), false);
  }
  return 1;
}

// ---------------------------------------------------------------- in the parent

struct Pipe {
  Pipe() { TORCH_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "launch: cannot make a pipe: ", std::strerror(errno)); }
  ~Pipe() {
    for (const int end : ends) close(end);
  }
  int ends[2];
};

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  TORCH_CHECK(!arguments.empty(), "launch: cannot read /proc/self/cmdline");
  return arguments;
}

EnvironmentMap rank_environment(int rank, int ranks, int port, int pipe) {
  auto environment = current_environment();
  environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(ranks);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(port);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"; // this process hosts it
  environment[kPipeVariable] = std::to_string(pipe);
  environment[kParentVariable] = std::to_string(getpid());
  environment.erase("TORCHELASTIC_RESTART_COUNT");
  // Ranks that each take every core spin against one another: torchrun's guard, with this machine's share.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (ranks > 1 && environment["OMP_NUM_THREADS"].empty())
    environment["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / ranks));
  return environment;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (auto& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

pid_t start_rank(const EnvironmentMap& environment, int inherited_pipe) {
  auto arguments = command_line();
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, inherited_pipe, inherited_pipe); // clears close-on-exec
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  if (passes_signals_on()) {
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    sigaddset(&blocked, SIGUSR1);
    posix_spawnattr_setsigmask(&attributes, &blocked);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  }
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, pointers(arguments).data(), pointers(variables).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  TORCH_CHECK(error == 0, "launch: cannot start ", arguments[0], ": ", std::strerror(error));
  return pid;
}

std::string describe_signal(int signal) {
  const char* name = sigabbrev_np(signal);
  return c10::str(signal, " (SIG", name ? name : "?", ")");
}

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) return c10::str("was killed by signal ", describe_signal(WTERMSIG(status)));
  return c10::str("exited with status ", WEXITSTATUS(status));
}

/// The ranks as the parent sees them: one thread for each waits for its end.
class Ranks {
 public:
  Ranks(int count, c10d::TCPStore& store)
      : store_(store), pids_(count), statuses_(count), ended_at_(count), stopped_(count), failures_(count) {
    try {
      passes_on_ = pass_signals_on();
      reader_ = std::thread(&Ranks::read_records, this);
      for (int rank = 0; rank < count; ++rank) {
        pids_[rank] = start_rank(rank_environment(rank, count, store.getPort(), pipe_.ends[1]), pipe_.ends[1]);
        {
          const std::lock_guard lock(mutex_); // those that run already may end
          running_.push_back(rank);
        }
        waiters_.emplace_back(&Ranks::wait_for_end, this, rank);
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Ranks() { stop(); }

  void run(const LaunchOptions& options) {
    std::unique_lock lock(mutex_);
    wait_for_end_or_failure(lock, timeout_seconds_or(options.stopped_seconds, current_environment()));
    if (first_failed_ < 0) return;
    changed_.wait_for(lock, std::chrono::seconds(options.grace_seconds), [&] { return running_.empty(); });
    const auto stopped = running_;
    lock.unlock();
    stop();
    throw_failure(stopped);
  }

 private:
  struct Failure {
    bool known = false, consequence = false;
    int64_t nanoseconds = 0;
    std::string text;
  };

  /// The ranks write their records at this one's SIGUSR1, which would end it otherwise.
  std::unique_ptr<SignalWatch> pass_signals_on() {
    if (!passes_signals_on()) return nullptr;
    auto watch = std::make_unique<SignalWatch>();
    watch->start([this] {
      const std::lock_guard lock(mutex_);
      for (const int rank : running_) kill(pids_[rank], SIGUSR1);
    });
    return watch;
  }

  // Each second counts in which this process ran itself: a shell may have stopped all of the job, and go on with it later.
  void wait_for_end_or_failure(std::unique_lock<std::mutex>& lock, int stopped_seconds) {
    for (int seconds = 0; !running_.empty() && first_failed_ < 0;) {
      if (!absl::c_all_of(running_, [&](int rank) { return stopped_[rank] != 0; })) {
        seconds = 0;
        changed_.wait(lock);
      } else if (seconds == stopped_seconds) {
        first_failed_ = running_.front();
        for (const int rank : running_)
          fail(rank, c10::str("is stopped by signal ", describe_signal(stopped_[rank]), ", for ", seconds, " s"));
      } else if (changed_.wait_for(lock, std::chrono::seconds(1)) == std::cv_status::timeout) {
        ++seconds;
      }
    }
  }

  void wait_for_end(int rank) {
    int status = 0;
    pid_t ended = 0;
    do {
      ended = waitpid(pids_[rank], &status, WUNTRACED | WCONTINUED);
    } while (ended < 0 ? errno == EINTR : note_stop(rank, status));
    {
      std::lock_guard lock(mutex_);
      statuses_[rank] = status;
      ended_at_[rank] = now_in_nanoseconds();
      std::erase(running_, rank);
      if ((ended < 0 || status != 0) && !stopping_) {
        if (first_failed_ < 0) first_failed_ = rank;
        fail(rank, ended < 0 ? "ended, but something else in this process has taken its status" : describe_status(status));
      }
      changed_.notify_all();
    }
    try {
      add_ended_rank(store_, rank);
    } catch (const std::exception&) { // those that wait for it to join then learn of it at their timeout
    }
  }

  // False for a status of an end.
  bool note_stop(int rank, int status) {
    if (!WIFSTOPPED(status) && !WIFCONTINUED(status)) return false;
    std::lock_guard lock(mutex_);
    stopped_[rank] = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
    changed_.notify_all();
    return true;
  }

  // With `mutex_` held.
  void fail(int rank, std::string text) { failures_[rank] = {true, false, now_in_nanoseconds(), std::move(text)}; }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      for (const int rank : running_) kill(pids_[rank], SIGKILL);
    }
    for (auto& waiter : waiters_)
      if (waiter.joinable()) waiter.join();
    if (!reader_.joinable()) return;
    const FailureRecord last{.rank = kNoRank};
    while (write(pipe_.ends[1], &last, sizeof(last)) < 0 && errno == EINTR) continue;
    reader_.join();
  }

  // While the ranks run: the pipe has no room for the records of many, and who cannot write one is killed in the end.
  void read_records() {
    FailureRecord record;
    while (true) {
      const auto count = read(pipe_.ends[0], &record, sizeof(record));
      if (count < 0 && errno == EINTR) continue;
      if (count != sizeof(record) || record.rank == kNoRank) return;
      records_.push_back(record);
    }
  }

  void note_records() {
    for (const auto& record : records_) {
      auto& failure = failures_[record.rank];
      // It died while it unwound: the signal says more, unless the exception itself ended the program.
      if (failure.known && WIFSIGNALED(statuses_[record.rank]) && WTERMSIG(statuses_[record.rank]) != SIGABRT) continue;
      failure = {true, record.consequence, record.nanoseconds, c10::str("failed: ", record.text)};
    }
  }

  // Status 0 is a failure where others waited for the rank.
  void read_missing_rank(const std::vector<int>& stopped) try {
    if (!store_.check({kMissingRankKey})) return;
    const auto missing = MissingRank::decode(store_.get_to_str(kMissingRankKey)).value_or(MissingRank{});
    const auto rank = static_cast<size_t>(missing.rank);
    if (missing.reason != MissingRank::Reason::kEnded || rank >= pids_.size() || failures_[rank].known) return;
    if (absl::c_linear_search(stopped, missing.rank)) return;
    failures_[rank] = {true, false, ended_at_[rank], "exited with status 0 before the others finished"};
  } catch (const std::exception&) { // the other ranks' messages name it
  }

  [[noreturn]] void throw_failure(const std::vector<int>& stopped) {
    note_records();
    read_missing_rank(stopped);
    // The cause is the first failure that is not a lost connection to somebody else.
    const auto first = std::ranges::min_element(failures_, {}, [](const Failure& failure) {
      return std::tuple(!failure.known, failure.consequence, failure.nanoseconds);
    });
    const auto cause = static_cast<int>(first - failures_.begin());
    std::string others;
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank)
      if (rank != cause && failures_[rank].known) others += c10::str("\n  rank ", rank, " then ", failures_[rank].text);
    if (!stopped.empty())
      others += c10::str("\n  ended by launch: rank", stopped.size() == 1 ? " " : "s ", c10::Join(", ", stopped));
    TORCH_CHECK(false, "rank ", cause, " of ", pids_.size(), " ", first->text, others);
  }

  c10d::TCPStore& store_;
  Pipe pipe_;
  std::vector<pid_t> pids_;
  std::vector<std::thread> waiters_;
  std::thread reader_;
  std::vector<FailureRecord> records_; // of `reader_`, while it runs
  std::mutex mutex_;                   // guards what follows
  std::condition_variable changed_;
  std::vector<int> running_, statuses_;
  std::vector<int64_t> ended_at_;
  std::vector<int> stopped_; ///< the signal, of a rank that is stopped now
  std::vector<Failure> failures_;
  int first_failed_ = -1;
  bool stopping_ = false;
  std::unique_ptr<SignalWatch> passes_on_; // ends first
};

/// While it lives, the ends of children can be waited for: where SIGCHLD is ignored, as a parent may have left it, nobody learns
/// how they ended.
class ChildStatuses {
 public:
  ChildStatuses() {
    sigaction(SIGCHLD, nullptr, &before_);
    if (drops_them()) std::signal(SIGCHLD, SIG_DFL);
  }
  ~ChildStatuses() {
    if (drops_them()) sigaction(SIGCHLD, &before_, nullptr);
  }
  ChildStatuses(const ChildStatuses&) = delete;
  ChildStatuses& operator=(const ChildStatuses&) = delete;

 private:
  bool drops_them() const { return before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0; }

  struct sigaction before_ = {};
};

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

} // namespace

} // namespace tessera::internal

namespace tessera {

bool is_launched_rank() {
  const char* const pipe = std::getenv(internal::kPipeVariable);
  return pipe && *pipe;
}

int launch(int ranks, const std::function<void()>& worker, const LaunchOptions& options) {
  if (is_launched_rank()) return internal::run_as_rank(ranks, worker);
  internal::check_may_launch(ranks);
  const auto socket = internal::listen_for_store("127.0.0.1", 0, internal::StoreReach::kThisHost).value();
  c10d::TCPStore store(
      "127.0.0.1",
      c10d::TCPStoreOptions{.port = socket.port, .isServer = true, .waitWorkers = false, .masterListenFd = socket.descriptor});
  const internal::ChildStatuses statuses;
  internal::Ranks(ranks, store).run(options);
  return 0;
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
