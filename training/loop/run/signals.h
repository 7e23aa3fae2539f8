#pragma once

// Internal: the signals that a training answers.

namespace tessera::internal {

/// While one lives, SIGTERM and SIGUSR2 of this process are noted. The second SIGTERM ends the process, by the default action; a
/// signal that the parent process passes on within a second of the same signal from elsewhere is one (`launch` and torchrun do so
/// when a whole group of processes gets it). A handler of the program is called as well, and is in force again afterwards; a
/// signal that the program ignores stays ignored. Several may live, where ranks are threads of one process.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  static bool is_terminated();
  /// A SIGUSR2 that no save has answered.
  static bool is_save_asked();
  static void answer_save();
};

} // namespace tessera::internal
