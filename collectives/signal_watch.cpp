#include <tessera/collectives/signal_watch.h>

#include <tessera/collectives/background_scheduling.h>

#include <semaphore.h>
#include <cerrno>
#include <csignal>

namespace tessera::internal {

namespace {

// Of the process, as signals are. A handler may still run when its watch has gone. A forked child has a copy, and no thread.
sem_t arrived;

void note_arrival(int /*signal*/) {
  const int error = errno;
  sem_post(&arrived);
  errno = error;
}

bool is_unanswered() {
  struct sigaction action = {};
  return sigaction(SIGUSR1, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

bool is_ours() {
  struct sigaction action = {};
  return sigaction(SIGUSR1, nullptr, &action) == 0 && action.sa_handler == note_arrival;
}

void answer(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

} // namespace

SignalWatch::SignalWatch(std::function<void()> at_signal) : at_signal_(std::move(at_signal)) {
  if (!is_unanswered() && !is_ours()) return; // ours in a forked child that joins a job of its own
  sem_init(&arrived, 0, 0);
  const BackgroundScheduling of_the_thread;
  thread_ = std::thread([this] {
    while (!ends_) {
      if (sem_wait(&arrived) == 0 && !ends_) at_signal_();
    }
  });
  answer(note_arrival);
}

SignalWatch::~SignalWatch() {
  if (!thread_.joinable()) return;
  if (is_ours()) answer(SIG_DFL);
  ends_ = true;
  sem_post(&arrived);
  thread_.join();
}

} // namespace tessera::internal
