#include <tessera/training/loop/run/signals.h>

#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <mutex>

namespace tessera::internal {

namespace {

// These belong to the process, as signals do. A handler may still run when its scope has gone.
std::mutex scopes_mutex;
int scopes = 0;
std::atomic<bool> terminated{false}, save_asked{false};
std::atomic<bool> from_parent{false}; // the first SIGTERM
std::atomic<int64_t> first_at_ms{0};
struct sigaction programs_term = {}, programs_usr2 = {};

bool is_answered(const struct sigaction& action) { return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN; }

void call_programs(const struct sigaction& action, int signal, siginfo_t* info, void* context) {
  if (!is_answered(action)) return;
  if ((action.sa_flags & SA_SIGINFO) != 0)
    action.sa_sigaction(signal, info, context);
  else
    action.sa_handler(signal);
}

int64_t now_ms() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

/// Whether it is the first signal once more, which came by way of the parent or past it.
bool is_passed_on(const siginfo_t* info) {
  const bool by_parent = info != nullptr && info->si_pid == getppid();
  constexpr int64_t kTogetherMs = 1000;
  return by_parent != from_parent && now_ms() - first_at_ms < kTogetherMs;
}

void end_by_default(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  kill(getpid(), signal); // delivered when this handler has returned
}

void note_sigterm(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (terminated.exchange(true)) {
    if (!is_passed_on(info)) end_by_default(signal);
  } else {
    from_parent = info != nullptr && info->si_pid == getppid();
    first_at_ms = now_ms();
    call_programs(programs_term, signal, info, context);
  }
  errno = error;
}

void note_sigusr2(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  save_asked = true;
  call_programs(programs_usr2, signal, info, context);
  errno = error;
}

using Handler = void (*)(int, siginfo_t*, void*);

void answer(int signal, Handler handler, struct sigaction& before) {
  if (sigaction(signal, nullptr, &before) != 0) return;
  if ((before.sa_flags & SA_SIGINFO) == 0 && before.sa_handler == SIG_IGN) return;
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigaction(signal, &action, nullptr);
}

void restore(int signal, Handler handler, const struct sigaction& before) {
  struct sigaction current = {};
  if (sigaction(signal, nullptr, &current) != 0) return;
  const bool is_ours = (current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == handler;
  if (is_ours) sigaction(signal, &before, nullptr); // unless the program has set another one meanwhile
}

} // namespace

SignalScope::SignalScope() {
  const std::lock_guard lock(scopes_mutex);
  if (scopes++ > 0) return;
  terminated = false;
  save_asked = false;
  answer(SIGTERM, note_sigterm, programs_term);
  answer(SIGUSR2, note_sigusr2, programs_usr2);
}

SignalScope::~SignalScope() {
  const std::lock_guard lock(scopes_mutex);
  if (--scopes > 0) return;
  restore(SIGTERM, note_sigterm, programs_term);
  restore(SIGUSR2, note_sigusr2, programs_usr2);
}

bool SignalScope::is_terminated() { return terminated; }
bool SignalScope::is_save_asked() { return save_asked; }
void SignalScope::answer_save() { save_asked = false; }

} // namespace tessera::internal
