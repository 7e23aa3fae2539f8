#include <tessera/tests/support/simulated_device/checker.h>

#include <c10/util/StringUtil.h>

#include <utility>

namespace tessera::testing::sim {

void Checker::track(const void* begin, size_t size) {
  const std::lock_guard lock(mutex_);
  const auto* const address = static_cast<const char*>(begin);
  memory_.insert_or_assign(address, Memory{address + size, 0, {}});
}

void Checker::untrack(const void* begin) {
  const std::lock_guard lock(mutex_);
  memory_.erase(static_cast<const char*>(begin));
}

void Checker::begin_new_life(const void* begin) {
  const std::lock_guard lock(mutex_);
  if (auto* const memory = find(static_cast<const char*>(begin))) ++memory->life;
}

void Checker::settle(const void* begin, const Clock& done) {
  const std::lock_guard lock(mutex_);
  auto* const memory = find(static_cast<const char*>(begin));
  if (memory) std::erase_if(memory->accesses, [&](const Access& access) { return done.covers(access.by->position); });
}

void Checker::note(Launched launched, const std::vector<Use>& uses, const Clock& known) {
  const auto by = std::make_shared<const Launched>(std::move(launched));
  const std::lock_guard lock(mutex_);
  for (const auto& use : uses) {
    auto* const memory = use.region.is_empty() ? nullptr : find(use.region.begin());
    if (!memory) continue;
    const Access access{use.region, use.writes, memory->life, by};
    for (const auto& earlier : memory->accesses) {
      if (!earlier.writes && !use.writes) continue;
      if (!known.covers(earlier.by->position) && earlier.region.overlaps(use.region)) report(earlier, access);
    }
    // What comes after this access comes after those as well.
    std::erase_if(memory->accesses, [&](const Access& earlier) {
      if (!use.region.covers(earlier.region) || !known.covers(earlier.by->position)) return false;
      return use.writes || (!earlier.writes && earlier.by->position.stream == by->position.stream);
    });
    memory->accesses.push_back(access);
  }
}

Checker::Memory* Checker::find(const char* address) {
  auto found = memory_.upper_bound(address);
  if (found == memory_.begin()) return nullptr;
  --found;
  return address < found->second.end ? &found->second : nullptr;
}

void Checker::report(const Access& earlier, const Access& later) {
  ++races_[c10::str(later.by->name, " on ", later.by->stream, later.writes ? " writes" : " reads", " what ", earlier.by->name,
                    " on ", earlier.by->stream, earlier.writes ? " writes" : " reads",
                    earlier.life == later.life ? "" : ", whose memory was freed and handed out again",
                    ": nothing orders the two")];
}

std::map<std::string, int64_t> Checker::races() const {
  const std::lock_guard lock(mutex_);
  return races_;
}

void Checker::reset() {
  const std::lock_guard lock(mutex_);
  races_.clear();
}

} // namespace tessera::testing::sim
