#pragma once

// Internal: how far a training is.

#include <cstdint>
#include <optional>

#include <tessera/data/data_source.h>

namespace tessera::internal {

/// The best value of a metric, and for how many evaluations there was none that is better.
struct BestMetric {
  std::optional<double> value;
  int64_t step = 0;
  int64_t without_improvement = 0;
};

/// What a checkpoint holds of a trainer itself; the same on every rank.
struct Progress {
  int64_t steps = 0, epochs = 0;
  double seconds = 0; ///< of all runs, by the first rank's clock
  DataPosition position;
  int64_t rows_a_step = 0; ///< of whole steps, the most; 0: there was none
  int64_t non_finite_in_a_row = 0;
  bool evaluation_is_due = false; ///< one was cut short
  int64_t evaluated_at = -1;      ///< the step of the last evaluation; -1: there was none
  BestMetric best, early_stop;
};

} // namespace tessera::internal
