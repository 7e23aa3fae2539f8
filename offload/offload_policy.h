#pragma once

#include <string>
#include <utility>

namespace tessera {

/// The place of a model's state while nothing computes with it: shards, reduced gradients, and optimizer state.
struct OffloadPolicy {
  enum class Memory {
    kDevice, ///< on the device
    kHost,   ///< in the host's memory; on a CPU mesh that is the device's
    kFiles,  ///< in files of a folder
  };
  Memory memory = Memory::kDevice;
  bool pin_memory = true; ///< page-locked, so that copies from and to the device overlap with what it computes; not on a CPU mesh
  std::string folder;     ///< for kFiles; it exists, and may differ between ranks
  friend bool operator==(const OffloadPolicy&, const OffloadPolicy&) = default;
};

/// Shards, gradients and the optimizer's state in the host's memory. (FSDP2: `CPUOffloadPolicy`.)
inline OffloadPolicy offload_to_host(bool pin_memory = true) {
  return {.memory = OffloadPolicy::Memory::kHost, .pin_memory = pin_memory, .folder = {}};
}

/// Stores it in unnamed files in `folder`, which are removed with the model, or when the process ends in any way. The files are
/// mapped into memory, so the tensors are read and written like any others. `tessera::step` moves optimizer state group by group.
/// On a mesh of a device, data passes through buffers of the host, which `pin_memory` makes page-locked.
inline OffloadPolicy offload_to_files(std::string folder, bool pin_memory = true) {
  return {.memory = OffloadPolicy::Memory::kFiles, .pin_memory = pin_memory, .folder = std::move(folder)};
}

} // namespace tessera
