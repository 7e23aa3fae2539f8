#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include <tessera/dtensor/calls/call_key.h>
#include <tessera/dtensor/plan/plan.h>

namespace tessera::internal::dispatch {

struct CacheStatistics {
  uint64_t hits = 0;
  uint64_t misses = 0; ///< those of calls without a key too
  size_t entries = 0;
};

/// The plans of one thread. Bounded: at most two generations of `kCapacity` plans; one that is used moves to the young
/// generation, and the old one is dropped when the young is full.
class PlanCache {
 public:
  /// The plan of a call; null: it is not known, or the call has no key.
  std::shared_ptr<Plan> find(const CallKey* key) {
    auto plan = key ? known(*key) : nullptr;
    ++(plan ? hits_ : misses_);
    return plan;
  }

  void insert(const CallKey& key, std::shared_ptr<Plan> plan) {
    if (young_.size() >= kCapacity) {
      old_ = std::move(young_);
      young_.clear();
    }
    young_.insert_or_assign(key, std::move(plan));
  }

  void clear() {
    young_.clear();
    old_.clear();
  }
  CacheStatistics statistics() const { return {hits_, misses_, young_.size() + old_.size()}; }

 private:
  static constexpr size_t kCapacity = 4096;

  std::shared_ptr<Plan> known(const CallKey& key) {
    const auto young = young_.find(key);
    if (young != young_.end()) return young->second;
    const auto old = old_.find(key);
    if (old == old_.end()) return nullptr;
    auto plan = old->second;
    insert(key, plan);
    return plan;
  }

  uint64_t hits_ = 0, misses_ = 0;
  absl::flat_hash_map<CallKey, std::shared_ptr<Plan>> young_, old_;
};

} // namespace tessera::internal::dispatch
