#pragma once

#include <chrono>

namespace tessera {

/// How the ranks of a group exchange CPU tensors.
enum class Transport {
  kAutomatic,    ///< all ranks on one host: shared memory, if they can share it. Several hosts with the same number of ranks on
                 ///< each, at least two: shared memory inside a host and gloo between hosts. Otherwise: gloo
  kSharedMemory, ///< the same, and an error if ranks on one host cannot share memory
  kGloo
};

struct ProcessGroupOptions {
  /// A collective that takes longer is an error on every rank. At most 9,999,999 s. Overridden by TESSERA_TIMEOUT_SECONDS.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  /// Ranks compare the signature of every collective; overridden by TESSERA_CHECK_COLLECTIVES=0|1. Over shared memory they always
  /// do, and over NCCL only if the variable is 1. Equal on all ranks.
  bool check_collectives = true;
  /// Overridden by TESSERA_TRANSPORT=automatic|shared_memory|gloo. Equal on all ranks.
  Transport transport = Transport::kAutomatic;
};

} // namespace tessera
