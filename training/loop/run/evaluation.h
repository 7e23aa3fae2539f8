#pragma once

// Internal: an evaluation, and what is made of its numbers.

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/training/loop/step/agreement.h>
#include <tessera/training/loop/step/progress.h>
#include <tessera/training/trainer_core.h>

namespace tessera::internal {

/// The means over all batches of all ranks; nothing where some rank `is_to_stop` between two batches. Every rank calls it.
std::optional<EvaluationEvent> evaluate(torch::nn::Module& module, const EvaluationWork& work, int64_t step, Agreement& agreement,
                                        const std::function<bool()>& is_to_stop);

/// The value of "valid" (its loss) or "valid.accuracy" among the evaluations.
double metric_in(const std::vector<EvaluationEvent>& events, const std::string& metric);
/// An error for two evaluations of one name, and for an empty one.
void check_names(const std::vector<EvaluationWork>& works);
/// An error where `metric`, which is `option`, belongs to none of the evaluations.
void check_metric(const std::vector<EvaluationWork>& works, const std::string& metric, const char* option);

/// Takes a new value. Whether it is better than the best, by more than `min_change`. NaN is never better.
bool improve(BestMetric& best, double value, int64_t step, Better better, double min_change);

} // namespace tessera::internal
