#pragma once

// Internal: memory for the buffers of collectives.

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include <tessera/collectives/communicator.h>

namespace tessera::internal {

/// Hands out blocks, and keeps freed ones for the next request that fits. Of requests of like sizes it holds no
/// more blocks than were in use at once.
///
/// On the CPU a fresh block of many MB costs a page fault every 4 KiB, each time a buffer is made; on CUDA the caching
/// allocator already does this and blocks go straight to it. Thread-safe. Blocks may outlive the cache. A forked child gets none
/// of those that were kept: it may share their memory with its parent.
class BlockCache {
 public:
  explicit BlockCache(c10::Device device);

  /// Uninitialized memory; goes back to the cache when the DataPtr dies. A block that is made anew is the memory of
  /// `communicator`, if any, whose other ranks may read it where it lies.
  c10::DataPtr allocate(int64_t bytes, Communicator* communicator = nullptr);
  /// Bytes kept for later.
  int64_t cached_bytes() const;

 private:
  struct Pool;
  struct Block;
  c10::Device device_;
  int fork_depth_;
  std::shared_ptr<Pool> pool_;
};

} // namespace tessera::internal
