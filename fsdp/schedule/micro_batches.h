#pragma once

// Internal: which micro-batches of a step are in flight.

#include <cstdint>
#include <map>
#include <optional>
#include <string>

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
  /// Forgets those in flight.
  void give_up() { in_flight_.clear(); }

  const std::optional<MicroBatch>& running() const { return running_; }
  bool is_in(MicroBatchPhase phase) const { return running_ && running_->phase == phase; }
  /// What is gathered stays so to the end of the step, whatever the settings say.
  bool keeps_gathered() const { return running_ && running_->residency == Residency::kStage; }

 private:
  std::string list_in_flight(int64_t but) const;

  std::map<int64_t, bool> in_flight_; ///< by index; whether its phase I has ended
  std::optional<MicroBatch> running_;
  bool trains_ = false; ///< the phase that runs
};

/// "the input gradients of micro-batch 2"
std::string to_string(const MicroBatch& micro_batch);

} // namespace tessera::internal
