#include <tessera/training/loop/run/progress_state.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <map>

namespace tessera::internal {

namespace {

using nlohmann::json;

const std::string kPrefix = "trainer.";

void add_best(StateDict& state, const std::string& name, const BestMetric& best) {
  state.set(kPrefix + name, best.value ? std::vector<double>{*best.value} : std::vector<double>{});
  state.set(kPrefix + name + "_step", best.step);
  state.set(kPrefix + name + "_without_improvement", best.without_improvement);
}

BestMetric best_in(const StateDict& state, const std::string& name) {
  const auto& value = state.value<std::vector<double>>(kPrefix + name);
  return {.value = value.empty() ? std::nullopt : std::optional(value.front()),
          .step = state.value<int64_t>(kPrefix + name + "_step"),
          .without_improvement = state.value<int64_t>(kPrefix + name + "_without_improvement")};
}

/// "/optimizer/lr" → "optimizer.lr"
std::string key_of(std::string pointer) {
  std::string key;
  for (size_t i = 1; i < pointer.size(); ++i) key += pointer[i] == '/' ? '.' : pointer[i];
  return key.empty() ? "the whole" : key;
}

std::map<std::string, std::string> values_of(const json& config) {
  std::map<std::string, std::string> values;
  const auto flat = config.flatten();
  for (const auto& item : flat.items()) values[key_of(item.key())] = item.value().dump();
  return values;
}

} // namespace

StateDict state_of(const Progress& progress, uint64_t seed, const std::string& config) {
  StateDict state;
  state.set(kPrefix + "steps", progress.steps);
  state.set(kPrefix + "epochs", progress.epochs);
  state.set(kPrefix + "seconds", progress.seconds);
  state.set(kPrefix + "data_epoch", progress.position.epoch);
  state.set(kPrefix + "data_row", progress.position.row);
  state.set(kPrefix + "rows_a_step", progress.rows_a_step);
  state.set(kPrefix + "non_finite_in_a_row", progress.non_finite_in_a_row);
  state.set(kPrefix + "evaluation_is_due", progress.evaluation_is_due);
  state.set(kPrefix + "evaluated_at", progress.evaluated_at);
  add_best(state, "best", progress.best);
  add_best(state, "early_stop", progress.early_stop);
  state.set(kPrefix + "seed", std::bit_cast<int64_t>(seed));
  state.set(kPrefix + "config", config);
  return state;
}

Progress progress_in(const StateDict& state) {
  return {.steps = state.value<int64_t>(kPrefix + "steps"),
          .epochs = state.value<int64_t>(kPrefix + "epochs"),
          .seconds = state.value<double>(kPrefix + "seconds"),
          .position = {.epoch = state.value<int64_t>(kPrefix + "data_epoch"), .row = state.value<int64_t>(kPrefix + "data_row")},
          .rows_a_step = state.value<int64_t>(kPrefix + "rows_a_step"),
          .non_finite_in_a_row = state.value<int64_t>(kPrefix + "non_finite_in_a_row"),
          .evaluation_is_due = state.value<bool>(kPrefix + "evaluation_is_due"),
          .evaluated_at = state.value<int64_t>(kPrefix + "evaluated_at"),
          .best = best_in(state, "best"),
          .early_stop = best_in(state, "early_stop")};
}

uint64_t seed_in(const StateDict& state) { return std::bit_cast<uint64_t>(state.value<int64_t>(kPrefix + "seed")); }
const std::string& config_in(const StateDict& state) { return state.value<std::string>(kPrefix + "config"); }

std::vector<std::string> config_differences(const std::string& saved, const std::string& here) {
  if (saved == here) return {};
  const auto before = json::parse(saved, nullptr, /*allow_exceptions=*/false);
  const auto now = json::parse(here, nullptr, /*allow_exceptions=*/false);
  if (!before.is_object() || !now.is_object()) return {"the config is another text than that of the checkpoint"};
  const auto old_values = values_of(before), new_values = values_of(now);
  std::vector<std::string> lines;
  for (const auto& [key, value] : old_values) {
    const auto found = new_values.find(key);
    if (found == new_values.end())
      lines.push_back(fmt::format("{}: saved {}, not here", key, value));
    else if (found->second != value)
      lines.push_back(fmt::format("{}: saved {}, here {}", key, value, found->second));
  }
  for (const auto& [key, value] : new_values) {
    if (old_values.count(key) == 0) lines.push_back(fmt::format("{}: not saved, here {}", key, value));
  }
  return lines;
}

} // namespace tessera::internal
