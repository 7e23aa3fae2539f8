#include <tessera/tests/support/simulated_device/caching_allocator.h>

#include <tessera/tests/support/simulated_device/host_watch.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace tessera::testing::sim {

namespace {

constexpr size_t kGranularity = 512; // bytes, as CUDA's
constexpr size_t kAlignment = 512;

void* allocate_aligned(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, bytes) == 0, "the simulated device cannot allocate ", bytes, " bytes");
  return memory;
}

} // namespace

CachingAllocator& CachingAllocator::get() {
  static auto* const allocator = new CachingAllocator; // blocks are released until the process ends
  return *allocator;
}

c10::DataPtr CachingAllocator::allocate(size_t bytes) {
  const c10::Device device(kDeviceType, 0);
  if (bytes == 0) return {nullptr, nullptr, &CachingAllocator::release, device};
  auto* const block = take((bytes + kGranularity - 1) / kGranularity * kGranularity, current_stream());
  return {block->memory, block, &CachingAllocator::release, device};
}

void CachingAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  const auto* const from = static_cast<const char*>(source);
  const auto* const to = static_cast<const char*>(destination);
  Runtime::get().launch(current_stream(), {"copy_data",
                                           {{Region(from, from + bytes), false}, {Region(to, to + bytes), true}},
                                           [=] { std::memcpy(destination, source, bytes); }});
}

CachingAllocator::Block* CachingAllocator::take(size_t bytes, size_t stream) {
  auto& runtime = Runtime::get();
  Block* block = nullptr;
  bool poisons = false;
  {
    const std::lock_guard lock(mutex_);
    collect_awaited();
    auto& list = free_[{stream, bytes}];
    runtime.counters().add_allocation(static_cast<int64_t>(bytes), !list.empty());
    if (list.empty()) return make(bytes, stream);
    block = list.back();
    list.pop_back();
    poisons = poison_ == Poison::kAtReuse;
  }
  runtime.checker().begin_new_life(block->memory);
  if (poisons) poison(*block);
  return block;
}

CachingAllocator::Block* CachingAllocator::make(size_t bytes, size_t stream) {
  auto* const memory = allocate_aligned(bytes);
  std::memset(memory, 0xFF, bytes);
  Runtime::get().checker().track(memory, bytes);
  return blocks_[static_cast<const char*>(memory)] = new Block{memory, bytes, stream, {}, {}};
}

void CachingAllocator::release(void* block) {
  if (block) get().free(static_cast<Block*>(block));
}

void CachingAllocator::free(Block* block) {
  auto& runtime = Runtime::get();
  runtime.counters().add_release(static_cast<int64_t>(block->bytes));
  std::set<size_t> others;
  bool poisons = false;
  {
    const std::lock_guard lock(mutex_);
    others.swap(block->used_on);
    poisons = poison_ == Poison::kAtFree && others.empty();
  }
  if (poisons) poison(*block);
  std::vector<Mark> awaited;
  for (const auto other : others) awaited.push_back(runtime.record(other));
  const std::lock_guard lock(mutex_);
  block->awaited = std::move(awaited);
  (others.empty() ? free_[{block->stream, block->bytes}] : awaiting_).push_back(block);
}

void CachingAllocator::collect_awaited() {
  auto& runtime = Runtime::get();
  const auto is_done = [&](const Block* block) {
    return std::all_of(block->awaited.begin(), block->awaited.end(), [&](const Mark& mark) { return runtime.has_passed(mark); });
  };
  const auto first_done = std::partition(awaiting_.begin(), awaiting_.end(), [&](const Block* block) { return !is_done(block); });
  for (auto done = first_done; done != awaiting_.end(); ++done) {
    // This is all that the finding tells. That the host knew it would hide other races, or not, depending on the timing.
    for (const auto& mark : (*done)->awaited) runtime.checker().settle((*done)->memory, mark.known);
    (*done)->awaited.clear();
    free_[{(*done)->stream, (*done)->bytes}].push_back(*done);
  }
  awaiting_.erase(first_done, awaiting_.end());
}

void CachingAllocator::poison(const Block& block) {
  Runtime::get().push(block.stream, [memory = block.memory, bytes = block.bytes] { std::memset(memory, 0xFF, bytes); });
}

void CachingAllocator::record_stream(const void* data, size_t stream) {
  const std::lock_guard lock(mutex_);
  auto found = blocks_.upper_bound(static_cast<const char*>(data));
  if (found == blocks_.begin()) return;
  auto* const block = std::prev(found)->second;
  const bool is_inside = static_cast<const char*>(data) < static_cast<const char*>(block->memory) + block->bytes;
  if (is_inside && stream != block->stream) block->used_on.insert(stream);
}

void CachingAllocator::set_poison(Poison poison) {
  const std::lock_guard lock(mutex_);
  poison_ = poison;
}

PinnedAllocator& PinnedAllocator::get() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  auto* const memory = allocate_aligned(std::max<size_t>(bytes, 1));
  Runtime::get().checker().track(memory, std::max<size_t>(bytes, 1));
  const std::lock_guard lock(mutex_);
  if (ranges_.empty()) HostWatch::get().turn(true);
  ranges_[static_cast<const char*>(memory)] = bytes;
  return {memory, memory, &PinnedAllocator::release, c10::Device(c10::kCPU)};
}

void PinnedAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  std::memcpy(destination, source, bytes);
}

bool PinnedAllocator::holds(const void* address) {
  const std::lock_guard lock(mutex_);
  auto found = ranges_.upper_bound(static_cast<const char*>(address));
  if (found == ranges_.begin()) return false;
  --found;
  return static_cast<const char*>(address) < found->first + found->second;
}

void PinnedAllocator::release(void* memory) {
  Runtime::get().checker().untrack(memory);
  {
    auto& allocator = get();
    const std::lock_guard lock(allocator.mutex_);
    allocator.ranges_.erase(static_cast<const char*>(memory));
    if (allocator.ranges_.empty()) HostWatch::get().turn(false);
  }
  std::free(memory);
}

} // namespace tessera::testing::sim
