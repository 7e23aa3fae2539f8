#include <tessera/collectives/start/launched_rank.h>

#include <tessera/base/error_text.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/trace/job_trace.h>
#include <tessera/collectives/trace/signal_watch.h>

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

namespace tessera::internal {

namespace {

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

// Throws where a rank calls launch twice, or with another number of ranks. Also tells the parent, since the program may catch it
// and exit with 0.
void check_is_the_launch(int ranks, int pipe, bool is_first_call) try {
  TORCH_CHECK(is_first_call, "launch: called again in a rank; a program launches once, as the last thing that main does");
  const auto job = parse_job_environment(current_environment());
  const int world_size = job.world_size;
  const bool may_have_lost_ranks = job.restart > 0 && ranks > world_size;
  TORCH_CHECK(ranks == world_size || may_have_lost_ranks, "launch: asks for ", ranks, " ranks in one of ", world_size,
              ": every process of a program must come to the same call with the same number");
} catch (const c10::Error& error) {
  report_failure(pipe, error_text(error), false);
  throw;
}

// A rank starts with SIGUSR1 blocked, because by default it would end the process; this ignores the signal and unblocks it.
bool admit_passed_signal() try {
  if (!has_launch_pipe() || !passes_signals_on()) return false;
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

} // namespace

int64_t now_in_nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

bool has_launch_pipe() {
  const char* const pipe = std::getenv(kPipeVariable);
  return pipe && *pipe;
}

bool passes_signals_on() { return !trace_options(current_environment()).folder.empty(); }

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

} // namespace tessera::internal
