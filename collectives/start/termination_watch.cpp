#include <tessera/collectives/start/termination_watch.h>

#include <tessera/base/background_scheduling.h>

#include <semaphore.h>
#include <cerrno>
#include <csignal>
#include <utility>

namespace tessera::internal {

namespace {

// These belong to the process, as signals do. A handler may still run when its watch has gone.
sem_t termination_arrived;
std::atomic<bool> is_terminated{false};
struct sigaction programs_action = {};

bool has_handler(const struct sigaction& action) { return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN; }

void note_termination(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  is_terminated = true;
  sem_post(&termination_arrived);
  errno = error;
  if (!has_handler(programs_action)) return;
  if ((programs_action.sa_flags & SA_SIGINFO) != 0)
    programs_action.sa_sigaction(signal, info, context);
  else
    programs_action.sa_handler(signal);
}

bool is_noted() {
  struct sigaction action = {};
  return sigaction(SIGTERM, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) != 0 &&
         action.sa_sigaction == note_termination;
}

// What the program's handler was installed with holds for this one: it runs in its place.
void note_terminations() {
  auto action = programs_action;
  if (!has_handler(action)) action = {.sa_flags = SA_RESTART};
  action.sa_sigaction = note_termination;
  action.sa_flags = (action.sa_flags | SA_SIGINFO) & ~static_cast<int>(SA_RESETHAND);
  sigaction(SIGTERM, &action, nullptr);
}

} // namespace

TerminationWatch::TerminationWatch() {
  if (sigaction(SIGTERM, nullptr, &programs_action) != 0 || programs_action.sa_handler == SIG_IGN) return;
  is_terminated = false;
  sem_init(&termination_arrived, 0, 0);
  {
    const BackgroundScheduling of_the_thread;
    thread_ = std::thread(&TerminationWatch::serve, this); // first: where no thread can be started, the program's handler stays
  }
  note_terminations();
}

void TerminationWatch::serve() {
  while (!ends_) {
    if (sem_wait(&termination_arrived) != 0 || ends_) continue;
    const std::lock_guard lock(mutex_);
    if (at_signal_) at_signal_();
  }
}

void TerminationWatch::call_at_signal(std::function<void()> at_signal) {
  const std::lock_guard lock(mutex_);
  at_signal_ = std::move(at_signal);
  if (at_signal_ && has_arrived()) at_signal_();
}

bool TerminationWatch::has_arrived() const { return thread_.joinable() && is_terminated; }

TerminationWatch::~TerminationWatch() {
  if (!thread_.joinable()) return;
  if (is_noted()) sigaction(SIGTERM, &programs_action, nullptr); // unless the program has set another one meanwhile
  ends_ = true;
  sem_post(&termination_arrived);
  thread_.join();
}

} // namespace tessera::internal
