// A plan for people, and as JSON.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <tessera/base/text_table.h>
#include <tessera/plan/search.h>

namespace tessera {

namespace {

using nlohmann::ordered_json;

std::string gigabytes(int64_t bytes) {
  const double number = static_cast<double>(bytes) / 1e9;
  return number < 0.01 ? fmt::format("{:.2g}", number) : fmt::format("{:.2f}", number);
}

std::string settings_of(const PlanLimit& limit) {
  if (limit.plan) return limit.plan->settings.to_string() + (limit.is_complete ? "" : ", of those stepped");
  return limit.is_complete ? "nothing fits" : "not known: the steps ended";
}

internal::TextRow row_of(const std::string& what, const Prediction& prediction) {
  return {what,
          prediction.settings.to_string(),
          gigabytes(prediction.peak()),
          prediction.peak_phase,
          fmt::format("{:.4g}", prediction.seconds),
          fmt::format("{:.4g}", prediction.rows_per_second()),
          fmt::format("{:.0f} %", 100 * prediction.exposed / prediction.seconds)};
}

std::string table_of(const Plan& plan) {
  std::vector<internal::TextRow> rows{{"", "settings", "GB a rank", "peak in", "step, s", "rows/s", "waits"}};
  if (plan.best) rows.push_back(row_of("best", *plan.best));
  for (size_t i = 0; i < plan.runners_up.size(); ++i) rows.push_back(row_of(std::to_string(i + 2), plan.runners_up[i]));
  if (!plan.best && plan.smallest) rows.push_back(row_of("least", *plan.smallest));
  return internal::text_table(rows, {"GB a rank", "step, s", "rows/s", "waits"});
}

std::string limits_of(const Plan& plan) {
  if (plan.limits.empty()) return "";
  std::vector<internal::TextRow> rows{{"limit", "speed", "GB a rank", "settings"}};
  for (const auto& limit : plan.limits) {
    rows.push_back({limit.what, limit.plan ? fmt::format("{:.2f}", limit.speed) : "-", limit.plan ? gigabytes(limit.memory) : "-",
                    settings_of(limit)});
  }
  return "\n" + internal::text_table(rows, {"speed", "GB a rank"});
}

ordered_json json_of(const std::optional<Prediction>& prediction) {
  return prediction ? ordered_json::parse(prediction->to_json()) : ordered_json();
}

} // namespace

std::string Plan::to_string() const {
  std::string text =
      fmt::format("{} ranks of {}, {} GB a rank: {} settings, of which {} were stepped{}\n\n", machine.ranks(), machine.name,
                  gigabytes(budget), considered, stepped, is_complete ? "" : "; the search ended at its most steps");
  text += table_of(*this);
  if (!best) {
    text += is_complete ? "\nnothing fits" : "\nnothing that was stepped fits";
    if (smallest) text += fmt::format(" {} GB: the smallest needs {} GB", gigabytes(budget), gigabytes(smallest->peak()));
    text += '\n';
  }
  text += limits_of(*this);
  if (refused > 0) text += fmt::format("\n{} settings were refused, the first: {}\n", refused, first_refusal);
  return text;
}

std::string Plan::to_json() const {
  ordered_json runners = ordered_json::array(), costs = ordered_json::array();
  for (const auto& each : runners_up) runners.push_back(json_of(each));
  for (const auto& limit : limits)
    costs.push_back({{"what", limit.what},
                     {"speed", limit.speed},
                     {"memory", limit.memory},
                     {"complete", limit.is_complete},
                     {"plan", json_of(limit.plan)}});
  return ordered_json{{"format", "tessera plan"},
                      {"version", 1},
                      {"machine", ordered_json::parse(machine.to_json())},
                      {"budget", budget},
                      {"considered", considered},
                      {"stepped", stepped},
                      {"complete", is_complete},
                      {"refused", refused},
                      {"first_refusal", first_refusal},
                      {"best", json_of(best)},
                      {"runners_up", runners},
                      {"limits", costs},
                      {"smallest", json_of(smallest)}}
      .dump(2);
}

} // namespace tessera
