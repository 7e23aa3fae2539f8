#pragma once

// Internal: what the gradients of a rank count, where its input runs out before that of others.

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::internal {

/// The weights that loops over a model's batches have set. They end in any order.
class GradientWeights {
 public:
  /// Sets the weight of the loop `setter`, in place of what it set before.
  void set(const void* setter, double weight) {
    const auto found = find(setter);
    if (found == weights_.end()) return void(weights_.emplace_back(setter, weight));
    found->second = weight;
  }
  void forget(const void* setter) {
    if (const auto found = find(setter); found != weights_.end()) weights_.erase(found);
  }
  /// Takes the weights of `other` too.
  void take(const GradientWeights& other) {
    for (const auto& [setter, weight] : other.weights_) set(setter, weight);
  }
  /// Returns the weight of the loop which began last; 1 without one.
  double current() const { return weights_.empty() ? 1 : weights_.back().second; }

 private:
  using Weights = std::vector<std::pair<const void*, double>>;
  Weights::iterator find(const void* setter) {
    return std::find_if(weights_.begin(), weights_.end(), [&](const auto& each) { return each.first == setter; });
  }

  Weights weights_;
};

} // namespace tessera::internal
