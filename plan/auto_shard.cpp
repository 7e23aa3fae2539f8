#include <tessera/plan/auto_shard.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/plan/groups/structure.h>

namespace tessera {

namespace {

std::vector<internal::ModuleUnit> groups_of(const torch::nn::Module& module, const AutoShardOptions& options) {
  TORCH_CHECK_VALUE(options.budget >= 0, "auto_shard: budget is ", options.budget, " bytes, but must not be negative, on rank ",
                    internal::rank_for_errors());
  // Without sharding, one call makes buckets by itself.
  if (options.shard.strategy == Strategy::kNoShard) return {};
  const auto dtype = options.shard.mixed_precision.param_dtype;
  const int64_t item = dtype ? static_cast<int64_t>(c10::elementSize(*dtype)) : 0;
  return internal::joined(internal::units_of(module, options.budget, item), options.budget);
}

} // namespace

std::vector<std::vector<std::string>> auto_groups(const torch::nn::Module& module, const AutoShardOptions& options) {
  std::vector<std::vector<std::string>> paths;
  for (auto& group : groups_of(module, options)) paths.push_back(std::move(group.paths));
  return paths;
}

FSDPModule auto_shard(torch::nn::Module& module, const DeviceMesh& mesh, const AutoShardOptions& options) {
  for (const auto& group : groups_of(module, options)) fully_shard(group.modules, mesh, options.shard);
  return fully_shard(module, mesh, options.shard);
}

} // namespace tessera
