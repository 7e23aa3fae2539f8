#include <tessera/collectives/sums/block_cache.h>

#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <utility>

#include <tessera/base/forks.h>
#include <tessera/base/free_blocks.h>
#include <tessera/base/meta_memory.h>
#include <tessera/collectives/process_context.h>

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
      use_meta_block(block->memory, MemoryUse::kCached);
      const std::lock_guard lock(pool->mutex);
      pool->blocks.add(block->bytes, std::move(block->memory));
    }
  }
};

namespace {

/// A CPU does, and so does the meta device where it stands for one.
bool keeps_blocks(c10::Device device) {
  if (!device.is_meta() || !is_initialized()) return device.is_cpu();
  const auto* const clock = process_context().simulated_clock();
  return clock && clock->options().stands_for == c10::kCPU;
}

} // namespace

BlockCache::BlockCache(c10::Device device)
    : device_(device), fork_depth_(fork_depth()), pool_(keeps_blocks(device) ? std::make_shared<Pool>() : nullptr) {}

c10::DataPtr BlockCache::allocate(int64_t bytes, Communicator* communicator) {
  const c10::DeviceGuard guard(device_);
  const bool is_forked = fork_depth() != fork_depth_;
  const auto make = [&](int64_t size) {
    if (communicator && !is_forked) return communicator->allocate(size);
    return c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(size));
  };
  if (!pool_ || is_forked) return make(bytes);
  auto [size, memory] = pool_->take(bytes);
  if (!memory && !memory.get_context()) memory = make(size);
  use_meta_block(memory, current_memory_use());
  auto block = std::make_unique<Block>(Block{std::move(memory), size, pool_});
  void* data = block->memory.get();
  return {data, block.release(), &Block::give_back, device_};
}

int64_t BlockCache::cached_bytes() const {
  if (!pool_) return 0;
  const std::lock_guard lock(pool_->mutex);
  return pool_->blocks.bytes();
}

} // namespace tessera::internal
