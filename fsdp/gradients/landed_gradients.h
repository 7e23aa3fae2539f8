#pragma once

// Internal: which gradients of a group are still to come in a backward.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::internal {

/// The gradients that the reads of a forward foretold, and those that have landed in its backward. By the parameters' numbers.
class LandedGradients {
 public:
  explicit LandedGradients(size_t parameters) : landed_(parameters), expected_(parameters) {}

  /// Parameter `index` was read in forward number `forward`, with a gradient to come; another number forgets those of the one
  /// before.
  void expect(size_t index, uint64_t forward) {
    begin(forward);
    if (!std::exchange(expected_[index], true)) ++expected_count_;
  }
  /// Forward number `forward` has begun to read, perhaps something beside the group.
  void begin(uint64_t forward) {
    if (forward == forward_) return;
    forward_ = forward;
    expected_count_ = 0;
    std::fill(expected_.begin(), expected_.end(), false);
  }
  void land(size_t index) {
    if (!landed_[index]) ++landed_count_;
    landed_[index] = true;
    last_ = index;
  }
  void forget() {
    std::fill(landed_.begin(), landed_.end(), false);
    landed_count_ = 0;
  }

  bool expects_any() const { return expected_count_ > 0; }
  bool has_any() const { return landed_count_ > 0; }
  /// All gradients that are expected have landed.
  bool is_complete() const { return landed_count_ > 0 && !lacks_any(); }
  bool lacks_any() const { return landed_count_ < expected_count_; }
  /// The parameter whose gradient landed last, in the last backward that brought any.
  std::optional<size_t> last() const { return last_; }
  /// A gradient has not landed, and `comes` says of its parameter that it will.
  template <typename Comes> // bool(size_t index, bool is_expected)
  bool awaits_any(const Comes& comes) const {
    for (size_t i = 0; i < landed_.size(); ++i) {
      if (!landed_[i] && comes(i, static_cast<bool>(expected_[i]))) return true;
    }
    return false;
  }

 private:
  std::vector<bool> landed_;
  std::vector<char> expected_; ///< set at each read: no bits to mask
  uint64_t forward_ = 0;       ///< whose reads these are
  size_t landed_count_ = 0, expected_count_ = 0;
  std::optional<size_t> last_;
};

} // namespace tessera::internal
