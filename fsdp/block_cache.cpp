#include <tessera/fsdp/block_cache.h>

#include <c10/core/DeviceGuard.h>

#include <absl/container/flat_hash_map.h>

#include <mutex>
#include <vector>

namespace tessera::fsdp_internal {

struct BlockCache::Pool {
  std::mutex mutex;
  absl::flat_hash_map<int64_t, std::vector<c10::DataPtr>> blocks; // by size in bytes
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
      pool->blocks[block->bytes].push_back(std::move(block->memory));
    }
  }
};

BlockCache::BlockCache(c10::Device device) : device_(device), pool_(std::make_shared<Pool>()) {}

c10::DataPtr BlockCache::allocate(int64_t bytes) {
  const c10::DeviceGuard guard(device_);
  if (!device_.is_cpu()) return c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(bytes));
  auto block = std::make_unique<Block>(Block{{}, bytes, pool_});
  {
    const std::lock_guard lock(pool_->mutex);
    auto& free = pool_->blocks[bytes];
    if (!free.empty()) {
      block->memory = std::move(free.back());
      free.pop_back();
    }
  }
  if (!block->memory) block->memory = c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(bytes));
  void* data = block->memory.get();
  return {data, block.release(), &Block::give_back, device_};
}

void BlockCache::trim() {
  const std::lock_guard lock(pool_->mutex);
  pool_->blocks.clear();
}

int64_t BlockCache::cached_bytes() const {
  const std::lock_guard lock(pool_->mutex);
  int64_t bytes = 0;
  for (const auto& [size, blocks] : pool_->blocks) bytes += size * static_cast<int64_t>(blocks.size());
  return bytes;
}

} // namespace tessera::fsdp_internal
