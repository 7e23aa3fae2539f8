#pragma once

#include <absl/container/flat_hash_map.h>

#include <memory>

#include <tessera/dtensor/calls/call_key.h>
#include <tessera/dtensor/plan/plan.h>

namespace tessera::internal::dispatch {

/// The plans of one thread. Bounded: at most two generations of `capacity` plans; one that is used moves to the young generation,
/// and the old one is dropped when the young is full.
class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  std::shared_ptr<Plan> find(const CallKey& key) {
    const auto young = young_.find(key);
    if (young != young_.end()) return young->second;
    const auto old = old_.find(key);
    if (old == old_.end()) return nullptr;
    auto plan = old->second;
    insert(key, plan);
    return plan;
  }

  void insert(const CallKey& key, std::shared_ptr<Plan> plan) {
    if (young_.size() >= capacity_) {
      old_ = std::move(young_);
      young_.clear();
    }
    young_.insert_or_assign(key, std::move(plan));
  }

  void clear() {
    young_.clear();
    old_.clear();
  }
  size_t size() const { return young_.size() + old_.size(); }

 private:
  size_t capacity_;
  absl::flat_hash_map<CallKey, std::shared_ptr<Plan>> young_, old_;
};

} // namespace tessera::internal::dispatch
