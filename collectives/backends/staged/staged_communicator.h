#pragma once

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// Collectives on tensors of a device with streams, through the host: a copy to it, the same collective of `on_host` (a
/// communicator of CPU tensors, of the same ranks), and a copy back. For ranks that share a device, which NCCL refuses, and for
/// devices without collectives of their own.
///
/// The copies run on a stream of its own, after what the current stream holds. The collectives of the host run on a thread, in
/// their order; messages are waited for on a thread for each direction and peer. The end of the communicator ends what is in
/// flight with an error, as that of `on_host` does. `Work::wait` blocks the host until the copy back is launched, and then makes
/// the current stream wait for that.
CommunicatorPtr make_staged_communicator(CommunicatorPtr on_host, c10::Device device);

} // namespace tessera::internal
