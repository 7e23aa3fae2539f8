#include <tessera/collectives/backends/shared_memory/memory/arena.h>

#include <tessera/base/forks.h>

#include <ATen/ceil_div.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera::internal::shared_memory {

namespace {

// Every rank of the host has the arenas of all among its addresses, of which a process has 2^47.
int64_t range_of_one(int processes) {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::min(machine, (int64_t{1} << 46) / processes) / kPage * kPage;
}

/// Tells LibTorch's profiler of the memory, as its own allocator does.
void report_usage(void* data, int64_t bytes) {
  if (c10::memoryProfilingEnabled()) c10::reportMemoryUsageToProfiler(data, bytes, 0, 0, c10::Device(c10::kCPU));
}

} // namespace

/// A block in use.
struct Arena::Block {
  std::shared_ptr<Arena> arena;
  int64_t offset, bytes;
  int fork_depth;

  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    report_usage(block->arena->segment_.data() + block->offset, -block->bytes);
    // A forked child shares the pages with its parent.
    if (block->fork_depth == internal::fork_depth()) block->arena->give_back(block->offset, block->bytes);
  }
};

Arena::Arena(Segment segment) : segment_(std::move(segment)) {
  free_.emplace(0, segment_.bytes());
  madvise(segment_.data(), static_cast<size_t>(segment_.bytes()), MADV_DONTDUMP);
}

std::shared_ptr<Arena> Arena::create(int processes) {
  return std::shared_ptr<Arena>(new Arena(Segment::create(range_of_one(processes), 0)));
}

std::optional<int64_t> Arena::take(int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= bytes; });
  if (found == free_.end()) return std::nullopt;
  const auto [offset, size] = *found;
  free_.erase(found);
  if (size > bytes) free_.emplace(offset + bytes, size - bytes);
  return offset;
}

c10::DataPtr Arena::allocate(int64_t bytes) {
  const auto size = std::max(at::round_up(bytes, kPage), kPage);
  const auto offset = take(size);
  if (!offset) return {};
  auto block = std::make_unique<Block>(Block{shared_from_this(), *offset, size, fork_depth()});
  try {
    segment_.reserve(*offset, size);
  } catch (const c10::Error&) {
    give_back(*offset, size);
    return {};
  }
  report_usage(segment_.data() + *offset, size);
  return {segment_.data() + *offset, block.release(), &Block::free, c10::Device(c10::kCPU)};
}

std::optional<int64_t> Arena::find(const void* data) const {
  const auto offset = static_cast<const char*>(data) - segment_.data();
  return offset >= 0 && offset < segment_.bytes() ? std::optional<int64_t>(offset) : std::nullopt;
}

void Arena::give_back(int64_t offset, int64_t bytes) noexcept {
  segment_.release(offset, bytes);
  std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  free_.emplace(offset, bytes);
}

} // namespace tessera::internal::shared_memory
