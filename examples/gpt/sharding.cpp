#include "gpt/sharding.h"

namespace gpt {

void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options) {
  // Without sharding, one call makes buckets that are reduced while the backward goes on.
  if (options.strategy != tessera::Strategy::kNoShard) {
    for (const auto& block : *model->blocks()) examples::shard_module(*block, mesh, options);
  }
  examples::shard_module(*model, mesh, options);
}

} // namespace gpt
