#include <tessera/collectives/sums/block_cache.h>

#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <utility>

#include <tessera/base/forks.h>
#include <tessera/base/free_blocks.h>

namespace tessera::internal {

struct BlockCache::Pool {
  std::mutex mutex;
  FreeBlocks<c10::DataPtr> blocks;

  std::pair<int64_t, c10::DataPtr> take(int64_t bytes) {
    const std::lock_guard lock(mutex);
    return blocks.take(bytes);
  }
};

/// A block in use: goes home when its DataPtr dies.
struct BlockCache::Block {
  c10::DataPtr memory;
  int64_t bytes;
  std::weak_ptr<Pool> home;

  static void give_back(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    if (auto pool = block->home.lock()) {
      const std::lock_guard lock(pool->mutex);
      pool->blocks.add(block->bytes, std::move(block->memory));
    }
  }
};

BlockCache::BlockCache(c10::Device device) : device_(device), fork_depth_(fork_depth()), pool_(std::make_shared<Pool>()) {}

c10::DataPtr BlockCache::allocate(int64_t bytes, Communicator* communicator) {
  const c10::DeviceGuard guard(device_);
  const bool is_forked = fork_depth() != fork_depth_;
  const auto make = [&](int64_t size) {
    if (communicator && !is_forked) return communicator->allocate(size);
    return c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(size));
  };
  if (!device_.is_cpu() || is_forked) return make(bytes);
  auto [size, memory] = pool_->take(bytes);
  if (!memory) memory = make(size);
  auto block = std::make_unique<Block>(Block{std::move(memory), size, pool_});
  void* data = block->memory.get();
  return {data, block.release(), &Block::give_back, device_};
}

int64_t BlockCache::cached_bytes() const {
  const std::lock_guard lock(pool_->mutex);
  return pool_->blocks.bytes();
}

} // namespace tessera::internal
