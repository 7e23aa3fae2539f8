#pragma once

#include <functional>
#include <string>

namespace tessera {

/// The ranks of a job are about to be started again.
struct Restart {
  int number = 1;      ///< from 1
  int ranks = 0;       ///< of the job that begins
  std::string failure; ///< what `launch` would have thrown
};

/// The options of `launch`.
struct LaunchOptions {
  /// How long the other ranks may continue after one failed, before they are killed. TESSERA_GRACE_SECONDS does not change it.
  int grace_seconds = 2;
  /// How long the ranks that have not ended may all be stopped (SIGSTOP) before that is a failure. While others run, their
  /// collectives notice. Overridden by TESSERA_TIMEOUT_SECONDS.
  int stopped_seconds = 600;
  /// How long the ranks may continue after a SIGTERM, before they are killed. Overridden by TESSERA_GRACE_SECONDS.
  int termination_seconds = 30;
  /// How often all ranks are started again after one failed: the program goes on from its newest checkpoint. `launch` throws the
  /// failure after the last of them. After a SIGTERM nothing is started again. (torchrun: `--max-restarts`.)
  int max_restarts = 0;
  /// Each restart has a rank fewer than the job before, but at least so many: the device of the rank that failed may be lost.
  /// Ranks number from 0 again. 0: as many as before. (torchrun: the first number of `--nnodes 1:4`.)
  int min_ranks = 0;
  /// Is called in the first process before each restart, for a message.
  std::function<void(const Restart&)> on_restart = nullptr;
};

} // namespace tessera
