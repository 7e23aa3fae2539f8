#include "gpt/sharding.h"

namespace gpt {

void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options) {
  for (const auto& block : *model->blocks()) examples::shard_module(*block, mesh, options);
  examples::shard_module(*model, mesh, options);
}

} // namespace gpt
