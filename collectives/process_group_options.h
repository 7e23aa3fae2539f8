#pragma once

#include <chrono>

namespace tessera {

struct ProcessGroupOptions {
  /// A collective that takes longer is an error on every rank. Overridden by TESSERA_TIMEOUT_SECONDS.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  /// Compares the signature of every collective over a side channel; overridden by TESSERA_CHECK_COLLECTIVES=0|1.
  bool check_collectives = true;
};

} // namespace tessera
