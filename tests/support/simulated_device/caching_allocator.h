#pragma once

#include <tessera/tests/support/simulated_device/runtime.h>

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace tessera::testing::sim {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

/// When memory is filled with bytes 0xFF (NaN, -1), as an item of the stream that it was allocated on.
enum class Poison {
  kNever,
  kAtReuse, ///< when it is handed out again: nothing that is right on CUDA fails
  kAtFree   ///< already when it is freed: finds more, also programs that CUDA allows
};

/// The device's memory, with the rules of CUDA's caching allocator: a block belongs to the stream that it was allocated on, and
/// once freed it is handed out on that stream again, whatever other streams still do with it, but for those named by
/// `record_stream`.
class CachingAllocator final : public c10::Allocator {
 public:
  static CachingAllocator& get();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, size_t bytes) const override;

  /// The block that `data` points into is handed out again only after what `stream` holds at its release.
  void record_stream(const void* data, size_t stream);
  void set_poison(Poison poison);

 private:
  struct Block {
    void* memory;
    size_t bytes;
    size_t stream;
    std::set<size_t> used_on;  // by record_stream
    std::vector<Mark> awaited; // after its release
  };
  using FreeList = std::vector<Block*>;

  static void release(void* block);
  Block* take(size_t bytes, size_t stream);
  Block* make(size_t bytes, size_t stream);
  void free(Block* block);
  void collect_awaited();
  static void poison(const Block& block);

  std::mutex mutex_;
  Poison poison_ = Poison::kAtReuse;
  std::map<const char*, Block*> blocks_; // all that were ever made: a stale pointer reads poison, and does not crash
  std::map<std::pair<size_t, size_t>, FreeList> free_; // by stream and bytes
  FreeList awaiting_;
};

/// Page-locked memory of the host. Copies between it and the device may be asynchronous, and their accesses are checked too.
class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& get();

  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* destination, const void* source, size_t bytes) const override;
  bool holds(const void* address);

 private:
  static void release(void* memory);

  std::mutex mutex_;
  std::map<const char*, size_t> ranges_; // sizes by first byte
};

} // namespace tessera::testing::sim
