#pragma once

namespace tessera {

/// The options of `launch`.
struct LaunchOptions {
  /// How long the other ranks may continue after one failed, before they are killed. TESSERA_GRACE_SECONDS does not change it.
  int grace_seconds = 2;
  /// How long the ranks that have not ended may all be stopped (SIGSTOP) before that is a failure. While others run, their
  /// collectives notice. Overridden by TESSERA_TIMEOUT_SECONDS.
  int stopped_seconds = 600;
  /// How long the ranks may continue after a SIGTERM, before they are killed. Overridden by TESSERA_GRACE_SECONDS.
  int termination_seconds = 30;
};

} // namespace tessera
