#pragma once

namespace tessera {

/// Of `launch`.
struct LaunchOptions {
  /// How long the other ranks may continue after one failed, before they are killed.
  int grace_seconds = 2;
  /// How long the ranks that have not ended may all be stopped (SIGSTOP) before that is a failure. While others run, their
  /// collectives notice. Overridden by TESSERA_TIMEOUT_SECONDS.
  int stopped_seconds = 600;
};

} // namespace tessera
