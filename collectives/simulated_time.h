#pragma once

#include <c10/core/DeviceType.h>

#include <optional>

namespace tessera {

/// The source of the time of a simulated rank's own work.
struct SimulationOptions {
  /// The matrix products, convolutions and attention of the rank take their floating-point operations over this rate, and all
  /// else takes no time: for models on the meta device, and for other processors than this one. Without it, the time that this
  /// process takes between its collectives counts, which needs a real device.
  std::optional<double> flops_per_second = std::nullopt;
  /// The rate of attention's kernels, which mostly do not reach that of plain products. Unset: the same.
  std::optional<double> attention_flops_per_second = std::nullopt;
  /// The rate of matrix products in fp8. Unset: the same.
  std::optional<double> float8_flops_per_second = std::nullopt;
  /// Bytes that the rank reads and writes in a second, beside `flops_per_second`: each operator then takes the longer of its
  /// floating-point operations over that rate and of the bytes of its arguments and results over this one (a roofline). The
  /// optimizer's operators count as any others.
  std::optional<double> bytes_per_second = std::nullopt;
  /// What each operator takes besides, before it begins. Needs `bytes_per_second`.
  double launch_seconds = 0;
  /// What an operator on DTensors takes besides its kernels, a view too: the host's time for its plan.
  double dtensor_seconds = 0;
  /// Bytes a second between the rank's device and its host or files, for what is offloaded. The copies take compute time: nothing
  /// hides them. Unset: they take none.
  std::optional<double> host_bytes_per_second = std::nullopt;
  /// Whether the rank computes while its collectives run. Ranks that are processes of one host carry the bytes themselves: then
  /// a collective takes its time where it is called.
  bool overlaps = true;
  /// What a mesh on the meta device stands for. A CPU keeps freed buffers of collectives for the next ones; another device's
  /// allocator does, and they count as free.
  c10::DeviceType stands_for = c10::kCUDA;
};

/// Seconds since a `SimulatedClock` began, or was reset.
struct SimulatedTime {
  double total = 0;         ///< compute and exposed communication: the predicted time
  double compute = 0;       ///< of the rank's own work
  double exposed = 0;       ///< in which the rank only waits for collectives
  double communication = 0; ///< of all collectives, those that run beside the compute too
};

} // namespace tessera
