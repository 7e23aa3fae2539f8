#pragma once

#include <vector>

#include <tessera/plan/machine.h>
#include <tessera/plan/prediction.h>

namespace tessera {

/// A step that ran, and what was predicted of it.
struct MeasuredStep {
  Prediction prediction;
  double seconds = 0; ///< that it took
};

/// Returns `machine`, on which `steps` were predicted, with its rates (by its efficiency, as long as that is at most 1) over one
/// factor, and its links' times by another. They are those for which compute × the first + exposed communication × the second
/// comes nearest to the measured seconds: the sum of the squared relative errors is the least. One step, or steps that do not
/// tell the two apart, have one factor for both. What overlaps shifts when the factors do, so where communication runs beside
/// compute this is a first approximation; predict and fit again. A rate that kernels do not reach, or cores that are busy with
/// other things, are in the factors then. Errors: no step, or seconds that are not positive.
Machine fit_machine(const Machine& machine, const std::vector<MeasuredStep>& steps);

} // namespace tessera
