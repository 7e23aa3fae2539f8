#pragma once

#include <chrono>

namespace tessera {

/// How the ranks of a group exchange CPU tensors.
enum class Transport {
  kAutomatic,    ///< shared memory where all ranks of the group are on one host and can share it, a hierarchy of
                 ///< both where they are on several, with as many on each, and gloo otherwise
  kSharedMemory, ///< the same, and an error where ranks on one host cannot share memory
  kGloo
};

struct ProcessGroupOptions {
  /// A collective that takes longer is an error on every rank. At most 9,999,999 s. Overridden by TESSERA_TIMEOUT_SECONDS.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  /// Compares the signature of every collective beside its payload; overridden by TESSERA_CHECK_COLLECTIVES=0|1.
  /// Over shared memory they are always compared, and over NCCL where the variable says so alone. Equal on all ranks.
  bool check_collectives = true;
  /// Overridden by TESSERA_TRANSPORT=automatic|shared_memory|gloo. Equal on all ranks.
  Transport transport = Transport::kAutomatic;
};

} // namespace tessera
