#pragma once

// Internal: reads the micro-batches of steps, one ahead.

#include <algorithm>
#include <cstdint>
#include <deque>

#include <tessera/training/trainer_core.h>

namespace tessera::internal {

/// Fills the queue of a `MicroBatchWork`. It reads one micro-batch more than a step needs, so that a step knows whether it ends
/// the epoch. All functions are local.
class MicroBatchReader {
 public:
  MicroBatchReader(MicroBatchWork& work, int64_t micro_batches) : work_(&work), wanted_(static_cast<size_t>(micro_batches)) {}

  /// Reads what the next step needs; throws what the source throws, and for an epoch without any micro-batch.
  void fill();
  /// How many micro-batches the next step has: fewer at the end of an epoch.
  int64_t ready() const { return static_cast<int64_t>(std::min(wanted_, work_->size())); }
  /// Whether they are the last of the epoch.
  bool ends_epoch() const { return has_ended_ && work_->size() <= wanted_; }
  /// Takes them from the queue. Returns the position behind them.
  DataPosition consume();
  void seek(const DataPosition& position);

 private:
  bool read_one();

  MicroBatchWork* work_;
  size_t wanted_;
  std::deque<DataPosition> behind_; ///< each micro-batch of the queue
  bool has_ended_ = false;          ///< the epoch, with the last of the queue
};

} // namespace tessera::internal
