#pragma once

#include <string>
#include <utility>

namespace tessera {

/// Where a model's state lies while nothing computes with it: shards, reduced gradients, and what optimizers keep.
struct OffloadPolicy {
  enum class Memory {
    kDevice, ///< on the device
    kHost,   ///< in the host's memory; on a CPU mesh that is the device's
    kFiles,  ///< in files of a folder
  };
  Memory memory = Memory::kDevice;
  bool pin_memory = true; ///< page-locked, so that copies from and to the device overlap with what it computes; not on a CPU mesh
  std::string folder;     ///< of kFiles; it exists, and may be another one on each rank
  friend bool operator==(const OffloadPolicy&, const OffloadPolicy&) = default;
};

/// Shards, gradients and the optimizer's state in the host's memory. (FSDP2: `CPUOffloadPolicy`.)
inline OffloadPolicy offload_to_host(bool pin_memory = true) {
  return {.memory = OffloadPolicy::Memory::kHost, .pin_memory = pin_memory, .folder = {}};
}

/// The same in files of `folder`, which have no names and go with the model, or with the process however that ends. Everything
/// reads and writes the tensors as any others: a file is mapped into memory. `tessera::step` moves an optimizer's block by block.
/// On a mesh of a device, what comes and goes passes through buffers of the host, which `pin_memory` makes page-locked.
inline OffloadPolicy offload_to_files(std::string folder, bool pin_memory = true) {
  return {.memory = OffloadPolicy::Memory::kFiles, .pin_memory = pin_memory, .folder = std::move(folder)};
}

} // namespace tessera
