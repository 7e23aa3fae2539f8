#pragma once

// Internal: a log of the memory that tensors on the meta device would take.

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// What a block of memory is for, as far as the one who allocates it says.
enum class MemoryUse : uint8_t {
  kAny,
  kUnsharded,    ///< gathered parameters
  kReduceBuffer, ///< gradients before their reduction
  kCached,       ///< a freed block of these two, which is kept for the next
  kNothing       ///< none: a stand-in on the meta device of which the shape alone is asked for, on any device
};

/// While it lives, the blocks that this thread allocates are for `use`.
class MemoryUseScope {
 public:
  explicit MemoryUseScope(MemoryUse use);

 private:
  const ScopedValue<MemoryUse> use_;
};
MemoryUse current_memory_use();

/// While one lives, each block that this thread allocates on the meta device is noted, and its end on any thread. Elsewhere the
/// meta device allocates nothing, as without it. One a thread at a time.
class MetaMemory {
 public:
  struct Event {
    enum class Kind : uint8_t { kBegin, kUse, kEnd };
    Kind kind;
    MemoryUse use;  ///< from here on
    uint8_t phase;  ///< in which it happened
    uint32_t block; ///< its number, in the order of their begins
    int64_t bytes;  ///< of the block
  };
  /// Says in which phase the thread is now; a number of the caller's.
  using PhaseOf = uint8_t (*)();

  explicit MetaMemory(PhaseOf phase);
  ~MetaMemory();
  MetaMemory(const MetaMemory&) = delete;
  MetaMemory& operator=(const MetaMemory&) = delete;

  /// All events so far.
  std::vector<Event> events() const;
  size_t count() const;

  struct Log; ///< outlives this while a block does

 private:
  std::shared_ptr<Log> log_;
};

/// Notes that a block of the meta device is for `use` from here on. Nothing for other memory.
void use_meta_block(const c10::DataPtr& block, MemoryUse use);

} // namespace tessera::internal
