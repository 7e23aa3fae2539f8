#pragma once

#include <tessera/plan/search.h>

#include <string>

namespace tools {

/// What a prediction means for the model: tokens a second, and the share of the machine's peak rate that its operations by the
/// formula take.
struct Rates {
  double tokens_per_second = 0; ///< 0: its rows are no tokens
  double model_flops_utilization = 0;
};
Rates rates_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction);

/// A prediction or a plan as text, and as JSON.
std::string text_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction);
std::string json_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction);
std::string text_of(const tessera::PlannedModel& model, const tessera::Plan& plan);
std::string json_of(const tessera::PlannedModel& model, const tessera::Plan& plan);

} // namespace tools
