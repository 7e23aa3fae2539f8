#pragma once

// Internal: which phases of micro-batches follow each other.

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <tessera/fsdp/micro_batch.h>

namespace tessera::internal {

/// The phases of a step, which the step before foretells as long as it goes as that one did.
class PhaseOrder {
 public:
  void begin(MicroBatchPhase phase) {
    follows_ = follows_ && now_.size() < before_.size() && before_[now_.size()] == phase;
    if (now_.size() < kMost) now_.push_back(phase);
  }
  /// The step has ended with the phase that began last.
  void end_step() {
    before_ = std::exchange(now_, {});
    follows_ = true;
  }
  /// Forgets the step that runs.
  void forget() {
    now_.clear();
    follows_ = true;
  }
  /// What comes after the phase that began last; nothing where the last step says nothing of it.
  std::optional<MicroBatchPhase> next() const {
    if (!follows_ || now_.size() >= before_.size()) return std::nullopt;
    return before_[now_.size()];
  }

 private:
  static constexpr size_t kMost = size_t{1} << 16; // a program may never say that a step ends
  std::vector<MicroBatchPhase> before_, now_;
  bool follows_ = true; // `now_` begins as `before_` does
};

} // namespace tessera::internal
