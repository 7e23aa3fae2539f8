#include <tessera/base/meta_memory.h>

#include <c10/util/Exception.h>

#include <utility>

namespace tessera::internal {

struct MetaMemory::Log {
  explicit Log(PhaseOf of) : phase(of) {}

  uint32_t begin(int64_t bytes) {
    const std::lock_guard lock(mutex);
    events.push_back({Event::Kind::kBegin, current_memory_use(), phase(), blocks, bytes});
    return blocks++;
  }
  void note(Event::Kind kind, MemoryUse use, uint32_t block, int64_t bytes) {
    const std::lock_guard lock(mutex);
    events.push_back({kind, use, phase(), block, bytes});
  }

  mutable std::mutex mutex;
  const PhaseOf phase;
  std::vector<Event> events; // guarded by mutex, as all below
  uint32_t blocks = 0;
};

namespace {

struct Noted {
  MemoryUse use = MemoryUse::kAny;
  std::shared_ptr<MetaMemory::Log> log; ///< null: none is open
};
constinit PerThread<Noted> noted;

/// What stands for a block.
struct Block {
  std::shared_ptr<MetaMemory::Log> log;
  uint32_t number;
  int64_t bytes;

  static void end(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->log->note(MetaMemory::Event::Kind::kEnd, MemoryUse::kAny, block->number, block->bytes);
  }
};

void end_of_nothing(void* /*context*/) {}

/// Gives blocks without memory, as LibTorch's allocator of the meta device does.
class MetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = c10::Device(c10::kMeta);
    if (bytes == 0 || !noted->log) return {nullptr, nullptr, &end_of_nothing, device};
    const auto size = static_cast<int64_t>(bytes);
    auto block = std::make_unique<Block>(Block{noted->log, noted->log->begin(size), size});
    return {nullptr, block.release(), &Block::end, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &end_of_nothing; }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
};

/// Once, and for good: allocators are never taken back.
void replace_allocator() {
  static const bool done = [] {
    static MetaAllocator allocator;
    c10::SetAllocator(c10::kMeta, &allocator, /*priority=*/1);
    return true;
  }();
  static_cast<void>(done);
}

} // namespace

MemoryUseScope::MemoryUseScope(MemoryUse use) : use_(noted->use, use) {}
MemoryUse current_memory_use() { return noted->use; }

MetaMemory::MetaMemory(PhaseOf phase) : log_(std::make_shared<Log>(phase)) {
  TORCH_INTERNAL_ASSERT(!noted->log, "a log of the meta device's memory is open on this thread already");
  replace_allocator();
  noted->log = log_;
}
MetaMemory::~MetaMemory() { noted->log.reset(); }

std::vector<MetaMemory::Event> MetaMemory::events() const {
  const std::lock_guard lock(log_->mutex);
  return log_->events;
}
size_t MetaMemory::count() const {
  const std::lock_guard lock(log_->mutex);
  return log_->events.size();
}

void use_meta_block(const c10::DataPtr& block, MemoryUse use) {
  if (block.get_deleter() != &Block::end) return;
  const auto& known = *static_cast<const Block*>(block.get_context());
  known.log->note(MetaMemory::Event::Kind::kUse, use, known.number, known.bytes);
}

} // namespace tessera::internal
