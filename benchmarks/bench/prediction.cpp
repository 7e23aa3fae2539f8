#include "prediction.h"

#include <c10/util/ScopeExit.h>
#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/explain.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/mesh/device_mesh.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <utility>

#include "memory_meter.h"
#include "model.h"
#include "optimizers.h"
#include "settings.h"

namespace tessera::benchmarks {
namespace {

/// Bytes that a forward of any number of rows keeps for its backward: those of one, and of each further one.
struct Kept {
  int64_t one = 0, further = 0;
  int64_t by(int64_t rows) const { return one + (rows - 1) * further; }
};

Kept kept_by_rows(const BenchRecipe& recipe, Settings settings) {
  const MemoryMeter meter;
  const auto model = make_model(recipe, settings, Weights::kReal);
  const auto kept_by = [&](int64_t rows) {
    settings.batch = rows;
    const auto before = meter.now();
    const auto batch = make_batch(recipe, settings, {.rank = 0, .ranks = settings.ranks, .step = 0});
    const auto loss = loss_of(model, settings, batch);
    return meter.now() - before;
  };
  const auto one = kept_by(1);
  return {one, kept_by(2) - one};
}

/// What a model keeps, and what a block keeps more while it is recomputed.
struct Activations {
  Kept kept, inner;
};

Activations activations_of(const BenchRecipe& recipe, Settings settings) {
  Activations result{.kept = kept_by_rows(recipe, settings), .inner = {}};
  if (!settings.recompute) return result;
  settings.recompute = false;
  const auto blocks = static_cast<int64_t>(make_model(recipe, settings, Weights::kOnMeta).blocks.size());
  const auto all = kept_by_rows(recipe, settings);
  const auto of_one = [&](int64_t whole, int64_t rest) { return (whole - rest) / std::max<int64_t>(blocks, 1); };
  result.inner = {of_one(all.one, result.kept.one), of_one(all.further, result.kept.further)};
  return result;
}

/// The most of `most` rows that `limit` holds; 0 where one is too many.
template <typename Peak> // int64_t(int64_t rows), which grows
int64_t largest_batch(int64_t most, int64_t limit, const Peak& peak) {
  int64_t fits = 0, above = most + 1;
  while (above - fits > 1) {
    const auto middle = (fits + above) / 2;
    (peak(middle) <= limit ? fits : above) = middle;
  }
  return fits;
}

BenchModel sharded_on_meta(const Settings& settings, const BenchRecipe& recipe) {
  auto model = make_model(recipe, settings, Weights::kOnMeta);
  auto [sizes, names] = mesh_shape(settings);
  const auto mesh = init_device_mesh(at::kCPU, std::move(sizes), std::move(names));
  auto counted = settings; // state on the host counts as if it were on the device
  if (settings.offload == "host") counted.offload = "none";
  shard_model(model, counted, mesh, std::filesystem::temp_directory_path());
  return model;
}

} // namespace

nlohmann::ordered_json predict(const BenchSettings& settings, const BenchRecipe& recipe) {
  const auto activations = activations_of(recipe, settings);
  init_fake_process_group(/*rank=*/0, settings.ranks);
  const auto leave = c10::make_scope_exit([] { destroy_process_group(); });
  const auto model = sharded_on_meta(settings, recipe);
  const auto memory_of = [&](int64_t rows) {
    return explain(*model.module, {.optimizer_tensors = optimizer_tensors(settings.optimizer),
                                   .activation_bytes = activations.kept.by(rows) + activations.inner.by(rows)})
        .memory;
  };
  const auto peak_of = [&](int64_t rows) { return memory_of(rows).peak; };
  nlohmann::ordered_json result{{"parameters", parameter_count(*model.module)},
                                {"activation_bytes", activations.kept.by(settings.batch)},
                                {"recomputed_bytes", activations.inner.by(settings.batch)},
                                {"explained_peak_bytes", peak_of(settings.batch)},
                                {"peak_at", memory_of(settings.batch).peak_at},
                                {"verified", false}};
  if (settings.memory_limit_mb == 0) return result;
  result["explained_largest_batch"] = largest_batch(settings.batch, settings.memory_limit_mb * 1'000'000, peak_of);
  constexpr int64_t kMostPeaks = 1000;
  for (int64_t rows = 1; rows <= std::min(settings.batch, kMostPeaks); ++rows) result["explained_peaks"].push_back(peak_of(rows));
  return result;
}

} // namespace tessera::benchmarks
