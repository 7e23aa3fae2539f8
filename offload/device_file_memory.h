#pragma once

// Internal: a file as memory for what a device computes with.

#include <memory>

#include <tessera/offload/file_memory.h>
#include <tessera/offload/offload_memory.h>

namespace tessera::internal {

/// `file` for tensors of a device. What goes from one to the other passes through a buffer of the host, page-locked or not. A
/// fetch reads the file while the device computes, and `wait` gives the current stream the copy. A store holds the host until the
/// device has the values and the file is written, so that the host never has more than one group's gradients.
std::shared_ptr<OffloadMemory> make_device_file_memory(std::shared_ptr<FileMemory> file, bool pinned);

} // namespace tessera::internal
