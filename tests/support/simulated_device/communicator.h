#pragma once

#include <tessera/collectives/backends/backend.h>
#include <tessera/collectives/communicator.h>

#include <optional>

namespace tessera::testing::sim {

/// Collectives as NCCL's process group runs them: on a stream of the communicator's own, after what the calling thread's current
/// stream holds. `Work::wait` makes the calling thread's current stream wait, and blocks nobody. Gloo moves the bytes. What the
/// peers do wrong is an error at a later synchronization. Inputs and outputs are kept until the wait.
CommunicatorPtr make_communicator(const internal::GroupDescription& group);

/// Mistakes that the communicators of this process make from now on, for tests that must find them.
struct CommunicatorFaults {
  std::optional<CollectiveKind> skip_start; ///< they do not come after the current stream
  std::optional<CollectiveKind> skip_wait;  ///< `wait` makes no stream wait
  bool releases_early = false;              ///< tensors are not kept until the wait
  bool keeps_own_stream = false; ///< no mistake: `run_on_current_stream` changes nothing, as in a program's own communicator
};
void set_communicator_faults(const CommunicatorFaults& faults);

} // namespace tessera::testing::sim
