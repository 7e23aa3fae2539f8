#pragma once

// Internal: which micro-batches of a step are in flight, and which phases of them follow each other.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/fsdp/micro_batch.h>

namespace tessera::internal {

/// The micro-batches whose forward has been and whose backward has not ended, and the phase that runs.
class MicroBatches {
 public:
  /// Why `next` may not begin, in words that follow its name; empty if it may. `trains`: in grad mode.
  std::string refusal(const MicroBatch& next, bool trains) const;
  /// Begins what is not refused.
  void begin(const MicroBatch& next, bool trains);
  /// Ends the phase that runs. One that has failed leaves its micro-batch as it was in F, and none in flight otherwise.
  void end(bool has_failed);
  /// A backward begins, perhaps in the phase that runs.
  void note_backward() { has_run_backward_ = true; }
  /// Forgets those in flight.
  void give_up() { in_flight_.clear(); }

  const std::optional<MicroBatch>& running() const { return running_; }
  bool is_in(MicroBatchPhase phase) const { return running_ && running_->phase == phase; }
  /// No backward has run in the phase, in which gradients are to be reduced.
  bool lacks_backward() const {
    return running_ && running_->is_last && running_->phase != MicroBatchPhase::kForward && !has_run_backward_;
  }
  /// What is gathered stays so to the end of the step, whatever the settings say.
  bool keeps_gathered() const { return running_ && running_->residency == Residency::kStage; }

 private:
  std::string list_in_flight(int64_t but) const;

  std::map<int64_t, bool> in_flight_; ///< by index; whether its phase I has ended
  std::optional<MicroBatch> running_;
  bool trains_ = false;           ///< the phase that runs
  bool has_run_backward_ = false; ///< in it
};

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

/// "the input gradients of micro-batch 2"
std::string to_string(const MicroBatch& micro_batch);

} // namespace tessera::internal
