#include <tessera/collectives/start/launched_ranks.h>

#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/ranks/rank_watch.h>
#include <tessera/collectives/start/launched_rank.h>
#include <tessera/collectives/start/termination_watch.h>
#include <tessera/collectives/trace/signal_watch.h>

#include <absl/algorithm/container.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace tessera::internal {

namespace {

constexpr int kNoRank = -1;

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

EnvironmentMap rank_environment(int rank, const LaunchedJob& job, int port, int pipe) {
  auto environment = current_environment();
  environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(job.ranks);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(port);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"; // this process hosts it
  environment[kPipeVariable] = std::to_string(pipe);
  environment[kParentVariable] = std::to_string(getpid());
  environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(job.restart);
  // Ranks that each take every core spin against one another: torchrun's guard, with this machine's share.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (job.ranks > 1 && environment["OMP_NUM_THREADS"].empty())
    environment["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / job.ranks));
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

constexpr std::chrono::seconds kOneSignal(1); // within which a SIGTERM may come twice
constexpr int kTerminated = 128 + SIGTERM;    // as shells say it, and programs whose handler of the signal exits

bool exited_as_terminated(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == kTerminated; }
bool is_termination(int status) { return exited_as_terminated(status) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM); }

/// The ranks as the parent sees them: one thread for each waits for its end.
class Ranks {
 public:
  Ranks(const LaunchedJob& job, c10d::TCPStore& store, TerminationWatch& terminations)
      : store_(store),
        terminations_(terminations),
        pids_(job.ranks),
        statuses_(job.ranks),
        ended_at_(job.ranks),
        stopped_(job.ranks),
        failures_(job.ranks) {
    try {
      passes_on_ = pass_signals_on();
      terminations_.call_at_signal([this] { pass_termination_on(); });
      reader_ = std::thread(&Ranks::read_records, this);
      for (int rank = 0; rank < job.ranks; ++rank) {
        pids_[rank] = start_rank(rank_environment(rank, job, store.getPort(), pipe_.ends[1]), pipe_.ends[1]);
        {
          const std::lock_guard lock(mutex_); // those that run already may end
          running_.push_back(rank);
          if (terminated_at_) kill(pids_[rank], SIGTERM);
        }
        waiters_.emplace_back(&Ranks::wait_for_end, this, rank);
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Ranks() { stop(); }

  int run(const LaunchOptions& options, std::chrono::seconds termination) {
    std::unique_lock lock(mutex_);
    wait_for_end_or_failure(lock, timeout_seconds_or(options.stopped_seconds, current_environment()));
    if (first_failed_ < 0 && !terminated_at_) return 0;
    const bool is_terminated = wait_for_end_of_all(lock, std::chrono::seconds(options.grace_seconds), termination);
    const auto stopped = running_;
    lock.unlock();
    stop();
    if (!is_terminated && absl::c_all_of(statuses_, exited_as_terminated))
      return kTerminated; // ranks that agreed on one's signal
    if (!is_terminated || failed_before_termination_) throw_failure(stopped);
    if (!stopped.empty()) throw_unended(stopped, termination);
    if (absl::c_any_of(statuses_, is_termination)) return kTerminated;
    if (first_failed_ >= 0) throw_failure(stopped);
    return 0;
  }

 private:
  struct Failure {
    bool consequence = false; ///< as in `FailureRecord`
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

  // One that follows at once says nothing new: whoever sends the first to a group of processes may send this one another. A later
  // one is the second, at which a Trainer's ranks end without a save.
  void pass_termination_on() {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (terminated_at_ && now - *terminated_at_ < kOneSignal) return;
    if (!terminated_at_) terminated_at_ = now;
    for (const int rank : running_) kill(pids_[rank], SIGTERM);
    changed_.notify_all();
  }

  // Waits for the ends after a failure, a SIGTERM or both. Returns whether there was a SIGTERM.
  bool wait_for_end_of_all(std::unique_lock<std::mutex>& lock, std::chrono::seconds grace, std::chrono::seconds termination) {
    const auto is_over_or_passed_on = [&] { return running_.empty() || terminated_at_; };
    if (!terminations_.has_arrived()) changed_.wait_for(lock, grace, is_over_or_passed_on);
    if (!terminations_.has_arrived()) return false;
    changed_.wait(lock, is_over_or_passed_on);
    if (terminated_at_) changed_.wait_until(lock, *terminated_at_ + termination, [&] { return running_.empty(); });
    return true;
  }

  // Each second counts in which this process ran itself: a shell may have stopped all of the job, and go on with it later.
  void wait_for_end_or_failure(std::unique_lock<std::mutex>& lock, int stopped_seconds) {
    for (int seconds = 0; !running_.empty() && first_failed_ < 0 && !terminated_at_;) {
      if (!absl::c_all_of(running_, [&](int rank) { return stopped_[rank] != 0; })) {
        seconds = 0;
        changed_.wait(lock);
      } else if (seconds == stopped_seconds) {
        first_failed_ = running_.front();
        failed_before_termination_ |= !terminations_.has_arrived();
        for (const int rank : running_)
          fail(rank, c10::str("is stopped by signal ", describe_signal(stopped_[rank]), ", for ", seconds, " s"));
      } else if (changed_.wait_for(lock, std::chrono::seconds(1)) == std::cv_status::timeout) {
        ++seconds;
      }
    }
  }

  // One that has ended keeps its pid while it is among `running_`: another process of that pid would get its signals.
  void wait_for_end(int rank) {
    siginfo_t change{};
    while (waitid(P_PID, pids_[rank], &change, WEXITED | WSTOPPED | WCONTINUED | WNOWAIT) < 0 ? errno == EINTR : !is_end(change))
      note_stop(rank);
    {
      std::lock_guard lock(mutex_);
      int status = 0;
      const auto ended = waitpid(pids_[rank], &status, 0); // at once
      statuses_[rank] = status;
      ended_at_[rank] = now_in_nanoseconds();
      std::erase(running_, rank);
      if ((ended < 0 || status != 0) && !stopping_) {
        if (first_failed_ < 0) first_failed_ = rank;
        // One that had the same signal may end before the thread that passes it on has run, and others that wait for it.
        failed_before_termination_ |= !is_termination(status) && !terminations_.has_arrived();
        fail(rank, ended < 0 ? "ended, but something else in this process has taken its status" : describe_status(status));
      }
      changed_.notify_all();
    }
    try {
      add_ended_rank(store_, rank);
    } catch (const std::exception&) { // those that wait for it to join then learn of it at their timeout
    }
  }

  static bool is_end(const siginfo_t& change) { return change.si_code != CLD_STOPPED && change.si_code != CLD_CONTINUED; }

  void note_stop(int rank) {
    siginfo_t change{};
    if (waitid(P_PID, pids_[rank], &change, WSTOPPED | WCONTINUED | WNOHANG) < 0 || change.si_pid == 0) return;
    std::lock_guard lock(mutex_);
    stopped_[rank] = change.si_code == CLD_STOPPED ? change.si_status : 0;
    changed_.notify_all();
  }

  // With `mutex_` held.
  void fail(int rank, std::string text) { failures_[rank] = Failure{false, now_in_nanoseconds(), std::move(text)}; }

  void stop() {
    terminations_.call_at_signal(nullptr);
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
      if (failure && WIFSIGNALED(statuses_[record.rank]) && WTERMSIG(statuses_[record.rank]) != SIGABRT) continue;
      failure = Failure{record.consequence, record.nanoseconds, c10::str("failed: ", record.text)};
    }
  }

  // Status 0 is a failure where others waited for the rank.
  void read_missing_rank(const std::vector<int>& stopped) try {
    if (!store_.check({kMissingRankKey})) return;
    const auto missing = MissingRank::decode(store_.get_to_str(kMissingRankKey)).value_or(MissingRank{});
    const auto rank = static_cast<size_t>(missing.rank);
    if (missing.reason != MissingRank::Reason::kEnded || rank >= pids_.size() || failures_[rank]) return;
    if (absl::c_linear_search(stopped, missing.rank)) return;
    failures_[rank] = Failure{false, ended_at_[rank], "exited with status 0 before the others finished"};
  } catch (const std::exception&) { // the other ranks' messages name it
  }

  [[noreturn]] void throw_unended(const std::vector<int>& stopped, std::chrono::seconds termination) {
    const bool is_one = stopped.size() == 1;
    TORCH_CHECK(false, is_one ? "rank " : "ranks ", c10::Join(", ", stopped), " of ", pids_.size(), " had not ended ",
                termination.count(), " s after SIGTERM, and ", is_one ? "was" : "were",
                " killed; TESSERA_GRACE_SECONDS and LaunchOptions::termination_seconds allow more time");
  }

  [[noreturn]] void throw_failure(const std::vector<int>& stopped) {
    note_records();
    read_missing_rank(stopped);
    // The cause is the first failure that is not a lost connection to somebody else.
    const auto first = std::ranges::min_element(failures_, {}, [](const std::optional<Failure>& failure) {
      return failure ? std::tuple(false, failure->consequence, failure->nanoseconds) : std::tuple(true, false, int64_t{0});
    });
    const auto cause = static_cast<int>(first - failures_.begin());
    std::string others;
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank)
      if (rank != cause && failures_[rank]) others += c10::str("\n  rank ", rank, " then ", failures_[rank]->text);
    if (!stopped.empty())
      others += c10::str("\n  ended by launch: rank", stopped.size() == 1 ? " " : "s ", c10::Join(", ", stopped));
    TORCH_CHECK(false, "rank ", cause, " of ", pids_.size(), " ", (*first)->text, others);
  }

  c10d::TCPStore& store_;
  TerminationWatch& terminations_;
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
  std::vector<std::optional<Failure>> failures_;
  int first_failed_ = -1;
  bool stopping_ = false;
  std::optional<std::chrono::steady_clock::time_point> terminated_at_; ///< when the SIGTERM came
  bool failed_before_termination_ = false;
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

} // namespace

LaunchedEnd run_launched_ranks(const LaunchedJob& job, c10d::TCPStore& store, TerminationWatch& terminations,
                               const LaunchOptions& options) {
  const std::chrono::seconds termination(grace_seconds_or(options.termination_seconds, current_environment()));
  const ChildStatuses statuses;
  Ranks ranks(job, store, terminations);
  try {
    return {.status = ranks.run(options, termination)};
  } catch (...) {
    return {.failure = std::current_exception()};
  }
}

} // namespace tessera::internal
