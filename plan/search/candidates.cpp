#include <tessera/plan/search/candidates.h>

#include <absl/container/flat_hash_set.h>

#include <algorithm>
#include <string>
#include <utility>

#include <tessera/plan/step/planned_step.h>

namespace tessera::internal {

namespace {

constexpr int64_t kMostTensorRanks = 8, kMostStages = 16, kMostContextRanks = 8;

std::vector<int64_t> divisors(int64_t number, int64_t most) {
  std::vector<int64_t> all;
  for (int64_t divisor = 1; divisor <= std::min(number, most); ++divisor) {
    if (number % divisor == 0) all.push_back(divisor);
  }
  return all;
}

/// Data-parallel ranks whole, and a host's inside replicas: links between hosts then carry gradients alone.
void add_data_meshes(std::vector<PlanMesh>& meshes, PlanMesh mesh, int64_t data, int64_t ranks_a_host) {
  mesh.replicate = 1;
  mesh.shard = data;
  meshes.push_back(mesh);
  const auto inside = std::max<int64_t>(1, ranks_a_host / (mesh.tp * mesh.cp));
  for (const auto shard : {inside, 2 * inside, 4 * inside}) {
    if (shard <= 1 || shard >= data || data % shard != 0) continue;
    mesh.shard = shard;
    mesh.replicate = data / shard;
    meshes.push_back(mesh);
  }
}

std::vector<PlanMesh> meshes_of(const PlannedModel& model, const Machine& machine) {
  std::vector<PlanMesh> meshes;
  const auto ranks = machine.ranks();
  for (const auto tp : divisors(ranks, model.tensor_parallel ? std::min(kMostTensorRanks, machine.ranks_a_host) : 1)) {
    for (const auto pp : divisors(ranks / tp, model.layers ? kMostStages : 1)) {
      for (const auto cp : divisors(ranks / tp / pp, model.splits_sequence ? kMostContextRanks : 1)) {
        for (const auto ep : divisors(ranks / pp, model.experts > 0 ? model.experts : 1)) {
          if (ep > 1 && (model.experts % ep != 0 || ep % tp != 0)) continue;
          add_data_meshes(meshes, {.pp = pp, .cp = cp, .tp = tp, .ep = ep}, ranks / tp / pp / cp, machine.ranks_a_host);
        }
      }
    }
  }
  return meshes;
}

std::vector<Strategy> strategies_of(const SearchOptions& options) {
  if (!options.strategies.empty()) return options.strategies;
  std::vector<Strategy> all;
  for (const auto& row : kStrategies) all.push_back(row.strategy);
  return all;
}

/// A mesh for the strategy; nothing where it fits none.
std::optional<PlanMesh> mesh_for(Strategy strategy, PlanMesh mesh) {
  if (strategy == Strategy::kNoShard) {
    if (mesh.replicate > 1) return std::nullopt; // the whole data-parallel ranks are listed once
    std::swap(mesh.replicate, mesh.shard);
    return mesh;
  }
  return row_of(strategy).outer.has_value() == (mesh.replicate > 1) ? std::optional(mesh) : std::nullopt;
}

int64_t bytes_of_state(const std::string& optimizer, int64_t item) {
  if (optimizer == "SGD") return 0;
  if (optimizer == "AdamW8bit") return 2;
  if (optimizer == "Adafactor") return 0;
  return optimizer == "AdamW" || optimizer == "Adam" || optimizer == "Lamb" ? 2 * item : item;
}

/// What a rank keeps of parameters and state at least, without activations, gradients and what it gathers.
int64_t least_bytes_of(const PlanSettings& settings, int64_t parameters) {
  if (settings.offload != OffloadPolicy::Memory::kDevice) return 0;
  const auto& mesh = settings.mesh;
  const auto& row = row_of(settings.strategy);
  const int64_t item = settings.precision == PlanPrecision::kBf16Full ? 2 : 4, inner = mesh.shard * mesh.cp;
  const auto parts = [&](bool inside, bool outside) { return (inside ? inner : 1) * (outside ? mesh.replicate : 1); };
  const auto of_rank = parameters / (mesh.tp * mesh.pp) / std::max<int64_t>(1, mesh.ep); // more, where not all of it is split
  return of_rank * item / parts(row.inner.parameters, row.outer && row.outer->parameters) +
         of_rank * bytes_of_state(settings.optimizer, item) /
             parts(row.inner.optimizer_state, row.outer && row.outer->optimizer_state);
}

/// This is no prediction, but a guess for the order in which settings are stepped. Whatever needs no recomputation and splits
/// least of a layer comes first.
double cost_of(const PlanSettings& settings) {
  const auto& mesh = settings.mesh;
  double cost = !settings.recompute ? 1 : settings.keeps == RecomputeKeeps::kNothing ? 4.0 / 3 : 7.0 / 6;
  if (settings.float8) cost *= 0.7;
  cost *= 1 + 0.1 * static_cast<double>(mesh.tp - 1) + 0.1 * static_cast<double>(mesh.cp - 1);
  cost *= 1 + 0.1 * static_cast<double>(mesh.pp - 1);
  if (settings.offload != OffloadPolicy::Memory::kDevice) cost *= 2;
  if (settings.precision == PlanPrecision::kFp32) cost *= 2;
  const auto& row = row_of(settings.strategy);
  return cost * (row.inner.parameters ? 1.02 : 1) * (row.outer && row.outer->optimizer_state ? 1.01 : 1);
}

/// Each of `all` with each of the values.
template <typename Value>
void vary(std::vector<PlanSettings>& all, const std::vector<Value>& values, Value PlanSettings::*member) {
  std::vector<PlanSettings> varied;
  for (const auto& one : all) {
    for (const Value& value : values) {
      varied.push_back(one);
      varied.back().*member = value;
    }
  }
  all = std::move(varied);
}

/// The settings as they are in effect: a value that changes nothing there is that of the others which change nothing.
PlanSettings in_effect(PlanSettings settings, const Machine& machine) {
  settings = settings_on(machine, std::move(settings));
  if (!settings.recompute) settings.keeps = RecomputeKeeps::kNothing;
  const bool gathers =
      settings.float8 == Float8Scaling::kTensor && settings.strategy != Strategy::kNoShard && settings.mesh.tp == 1;
  settings.float8_gather = settings.float8_gather && gathers;
  if (settings.mesh.pp == 1) settings.schedule = PlanSettings().schedule;
  // A limit that no rank reaches says when gathers begin, which none does not.
  settings.resident_stages = settings.mesh.pp == 1 ? 0 : std::min(settings.resident_stages, chunks_of(settings));
  return settings;
}

/// Each that differs in effect once.
std::vector<PlanSettings> settings_of(const PlanMesh& mesh, Strategy strategy, const SearchOptions& options,
                                      const Machine& machine) {
  std::vector<PlanSettings> all(1, {.mesh = mesh, .strategy = strategy}), different;
  if (mesh.pp > 1) all.front().accumulation = 2 * mesh.pp;
  vary(all, options.layouts, &PlanSettings::layout);
  vary(all, options.precisions, &PlanSettings::precision);
  vary(all, options.float8, &PlanSettings::float8);
  vary(all, options.float8_gather, &PlanSettings::float8_gather);
  vary(all, options.optimizers, &PlanSettings::optimizer);
  vary(all, options.recompute, &PlanSettings::recompute);
  vary(all, options.keeps, &PlanSettings::keeps);
  vary(all, options.offload, &PlanSettings::offload);
  vary(all, options.schedules, &PlanSettings::schedule);
  vary(all, options.resident_stages, &PlanSettings::resident_stages);
  absl::flat_hash_set<std::string> known;
  for (const auto& one : all) {
    const auto settings = in_effect(one, machine);
    if (known.insert(settings.to_string()).second) different.push_back(settings);
  }
  return different;
}

} // namespace

std::vector<Candidate> candidates_of(const PlannedModel& model, const Machine& machine, const SearchOptions& options,
                                     int64_t parameters) {
  std::vector<Candidate> candidates;
  const auto meshes = options.meshes.empty() ? meshes_of(model, machine) : options.meshes;
  for (const auto strategy : strategies_of(options)) {
    for (const auto& given : meshes) {
      const auto mesh = options.meshes.empty() ? mesh_for(strategy, given) : std::optional(given);
      if (!mesh || mesh->ranks() != machine.ranks()) continue;
      const bool has_outer = row_of(strategy).outer.has_value(), is_split = strategy != Strategy::kNoShard;
      if (is_split ? has_outer != (mesh->replicate > 1) : mesh->shard > 1) continue;
      if (is_split && mesh->shard * mesh->cp * mesh->replicate == 1 && strategy != Strategy::kFullShard) continue; // all alike
      for (const auto& settings : settings_of(*mesh, strategy, options, machine))
        candidates.push_back({settings, least_bytes_of(settings, parameters), cost_of(settings)});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.cost < b.cost; });
  return candidates;
}

std::vector<PlanSettings> with_rows(const PlanSettings& settings, const SearchOptions& options) {
  std::vector<PlanSettings> all;
  const auto data = settings.mesh.data_ranks();
  if (options.global_rows == 0) {
    for (int64_t rows = 1; rows <= options.max_rows; rows *= 2) {
      all.push_back(settings);
      all.back().rows = rows;
    }
    return all;
  }
  if (options.global_rows % data != 0) return all;
  const auto own = options.global_rows / data;
  for (const auto rows : divisors(own, options.max_rows)) {
    if (own / rows < settings.mesh.pp) continue; // a pipeline of fewer micro-batches than stages is never full
    all.push_back(settings);
    all.back().rows = rows;
    all.back().accumulation = own / rows;
  }
  return all;
}

} // namespace tessera::internal
