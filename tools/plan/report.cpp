#include "report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace tools {

namespace {

using nlohmann::ordered_json;

double peak_flops(const tessera::Machine& machine, tessera::PlanPrecision precision) {
  const bool is_wide = precision == tessera::PlanPrecision::kFp32 || machine.bf16_flops == 0;
  return is_wide ? machine.fp32_flops : machine.bf16_flops;
}

/// A model without a formula counts what the steps ran.
double flops_a_row(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction) {
  if (model.flops_a_row > 0) return model.flops_a_row;
  return prediction.flops * static_cast<double>(machine.ranks()) / static_cast<double>(prediction.global_rows());
}

ordered_json object_of(const tessera::PlannedModel& model, const tessera::Machine& machine,
                       const tessera::Prediction& prediction) {
  auto json = ordered_json::parse(prediction.to_json());
  const auto rates = rates_of(model, machine, prediction);
  if (rates.tokens_per_second > 0) json["tokens_per_second"] = rates.tokens_per_second;
  json["model_flops_utilization"] = rates.model_flops_utilization;
  return json;
}

} // namespace

Rates rates_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction) {
  const auto rows = prediction.rows_per_second();
  const auto peak = peak_flops(machine, prediction.settings.precision) * static_cast<double>(machine.ranks());
  return {rows * static_cast<double>(model.sequence), rows * flops_a_row(model, machine, prediction) / peak};
}

std::string text_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction) {
  const auto rates = rates_of(model, machine, prediction);
  auto text = prediction.to_string();
  if (rates.tokens_per_second > 0)
    text += fmt::format("{:.4g} tokens/s, {:.4g} of them a rank; ", rates.tokens_per_second,
                        rates.tokens_per_second / static_cast<double>(machine.ranks()));
  return text + fmt::format("model FLOPS utilization {:.1f} %\n", 100 * rates.model_flops_utilization);
}

std::string json_of(const tessera::PlannedModel& model, const tessera::Machine& machine, const tessera::Prediction& prediction) {
  return object_of(model, machine, prediction).dump(2);
}

std::string text_of(const tessera::PlannedModel& model, const tessera::Plan& plan) {
  auto text = plan.to_string();
  if (plan.best) text += "\n" + text_of(model, plan.machine, *plan.best);
  return text;
}

std::string json_of(const tessera::PlannedModel& model, const tessera::Plan& plan) {
  auto json = ordered_json::parse(plan.to_json());
  if (plan.best) json["best"] = object_of(model, plan.machine, *plan.best);
  for (size_t i = 0; i < plan.runners_up.size(); ++i) json["runners_up"][i] = object_of(model, plan.machine, plan.runners_up[i]);
  return json.dump(2);
}

} // namespace tools
