#pragma once

// Internal: which gradients of a group wait for their reduction.

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace tessera::internal {

/// Knows the gradients by the parameters' numbers. One of weight 0 alone waits too, but counts as if this rank had none.
class PendingGradients {
 public:
  explicit PendingGradients(size_t parameters) : pending_(parameters), zero_weight_(parameters) {}

  void land(size_t index, bool is_blank) {
    zero_weight_[index] = is_blank && (zero_weight_[index] || !pending_[index]);
    if (!pending_[index]) ++count_;
    pending_[index] = true;
  }
  bool any() const { return count_ > 0; }
  const std::vector<bool>& all() const { return pending_; }
  /// Returns the parameters that this rank used. Then none is pending.
  std::vector<bool> take() {
    auto used = std::exchange(pending_, std::vector<bool>(pending_.size()));
    for (size_t i = 0; i < used.size(); ++i) used[i] = used[i] && !zero_weight_[i];
    std::fill(zero_weight_.begin(), zero_weight_.end(), false);
    count_ = 0;
    return used;
  }

 private:
  std::vector<bool> pending_, zero_weight_;
  size_t count_ = 0;
};

} // namespace tessera::internal
