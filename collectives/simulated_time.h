#pragma once

#include <optional>

namespace tessera {

/// The source of the time of a simulated rank's own work.
struct SimulationOptions {
  /// The matrix products, convolutions and attention of the rank take their floating-point operations over this rate, and all
  /// else takes no time: for models on the meta device, and for other processors than this one. Without it, the time that this
  /// process takes between its collectives counts, which needs a real device.
  std::optional<double> flops_per_second;
};

/// Seconds since a `SimulatedClock` began, or was reset.
struct SimulatedTime {
  double total = 0;         ///< compute and exposed communication: the predicted time
  double compute = 0;       ///< of the rank's own work
  double exposed = 0;       ///< in which the rank only waits for collectives
  double communication = 0; ///< of all collectives, those that run beside the compute too
};

} // namespace tessera
