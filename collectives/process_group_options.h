#pragma once

#include <chrono>
#include <optional>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

/// How the ranks of a group exchange CPU tensors.
enum class Transport {
  kAutomatic,    ///< all ranks on one host: shared memory, if they can share it. Several hosts with the same number of ranks on
                 ///< each, at least two: shared memory inside a host and gloo between hosts. Otherwise: gloo
  kSharedMemory, ///< the same, and an error if ranks on one host cannot share memory
  kGloo
};

/// A store that the program has already, and the place of this process in the job.
struct OwnStore {
  /// One that all ranks reach. Each makes a further connection to it (`Store::clone`), and sets keys that begin with "tessera/".
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
};

struct ProcessGroupOptions {
  /// A collective that takes longer is an error on every rank. At most 9,999,999 s. Overridden by TESSERA_TIMEOUT_SECONDS.
  std::chrono::milliseconds timeout{std::chrono::minutes(10)};
  /// Ranks compare the signature of every collective; overridden by TESSERA_CHECK_COLLECTIVES=0|1. Over shared memory they always
  /// do, and over NCCL only if the variable is 1. Equal on all ranks.
  bool check_collectives = true;
  /// Overridden by TESSERA_TRANSPORT=automatic|shared_memory|gloo. Equal on all ranks.
  Transport transport = Transport::kAutomatic;
  /// How long a thread that waits for other ranks over shared memory keeps its core before it sleeps, at most 1 s. 0 costs a wait
  /// the time of a wake-up, and leaves the core to others: for hosts that run more than this job. Overridden by
  /// TESSERA_SPIN_MICROSECONDS. Ranks may differ.
  std::chrono::microseconds spin{50};
  /// Replaces the store, rank and world size that the environment names, which then count no more, as in Python's
  /// init_process_group(store=…, rank=…, world_size=…). LOCAL_RANK counts, or that of Open MPI or Slurm; if none is set, the rank
  /// does. All ranks give one, or none does. It must answer as long as the job lasts. An error for `run_ranks_as_threads`.
  std::optional<OwnStore> own_store = std::nullopt;
};

} // namespace tessera
