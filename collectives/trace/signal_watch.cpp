#include <tessera/collectives/trace/signal_watch.h>

#include <tessera/base/background_scheduling.h>

#include <semaphore.h>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <optional>
#include <utility>

namespace tessera::internal {

namespace {

// This belongs to the process, as signals do. A handler may still run when its watch has gone. A forked child has a copy, and no
// thread.
sem_t arrived;

void note_arrival(int /*signal*/) {
  const int error = errno;
  sem_post(&arrived);
  errno = error;
}

void do_nothing(int /*signal*/) {}

// Null where that is none of this file's.
using Handler = void (*)(int);
std::optional<Handler> current() {
  struct sigaction action = {};
  if (sigaction(SIGUSR1, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) return std::nullopt;
  const auto handler = action.sa_handler;
  return handler == SIG_DFL || handler == do_nothing || handler == note_arrival ? std::optional(handler) : std::nullopt;
}

void answer(Handler handler) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

std::atomic<bool> is_ignored_without_watch{false};

} // namespace

void ignore_signal_without_watch() {
  if (current() != SIG_DFL) return;
  is_ignored_without_watch = true;
  answer(do_nothing);
}

SignalWatch::SignalWatch() : is_taken_(current().has_value()) {
  if (!is_taken_) return;
  sem_init(&arrived, 0, 0);
  answer(note_arrival);
}

void SignalWatch::start(std::function<void()> at_signal) {
  if (!is_taken_) return;
  at_signal_ = std::move(at_signal);
  const BackgroundScheduling of_the_thread;
  thread_ = std::thread([this] {
    while (!ends_) {
      if (sem_wait(&arrived) == 0 && !ends_) at_signal_();
    }
  });
}

SignalWatch::~SignalWatch() {
  if (is_taken_ && current() == note_arrival) answer(is_ignored_without_watch ? do_nothing : SIG_DFL);
  if (!thread_.joinable()) return;
  ends_ = true;
  sem_post(&arrived);
  thread_.join();
}

} // namespace tessera::internal
