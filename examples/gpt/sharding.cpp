#include "gpt/sharding.h"

namespace gpt {

tessera::ParallelPlan parallel_plan(bool sequence_parallel) {
  using tessera::Colwise, tessera::Rowwise, tessera::Sequence, tessera::VocabParallel;
  using tessera::Placement, tessera::ParallelPlan, tessera::Shard, tessera::Replicate;
  const Placement stream = sequence_parallel ? Placement(Shard{1}) : Placement(Replicate{});
  ParallelPlan plan{{"token_embedding", VocabParallel{stream}},
                    {"blocks.*.attention.qkv", Colwise{.packed = 3}},
                    {"blocks.*.attention.projection", Rowwise{.output = stream}},
                    {"blocks.*.expand", Colwise{}},
                    {"blocks.*.contract", Rowwise{.output = stream}}};
  if (sequence_parallel) plan.insert(plan.end(), {{"blocks.*.*_norm", Sequence{}}, {"norm", Sequence{}}});
  return plan;
}

void shard(Gpt& model, const tessera::DeviceMesh& all, const Options& options) {
  auto mesh = all;
  if (options.tensor_parallel) {
    tessera::parallelize(*model, all["tp"], parallel_plan(options.sequence_parallel));
    auto names = all.dim_names();
    names.pop_back();
    mesh = all[names];
  }
  // Without sharding, one call makes buckets that are reduced while the backward goes on.
  if (options.strategy != tessera::Strategy::kNoShard) {
    for (const auto& block : *model->blocks()) examples::shard_module(*block, mesh, options);
  }
  examples::shard_module(*model, mesh, options);
}

} // namespace gpt
