#pragma once

#include "common/sharding.h"
#include "gpt/model.h"
#include "gpt/options.h"

namespace gpt {

/// Shards `model` over `mesh` as `options` say: every block is a group, and what remains is the root's. Without sharding it is
/// one call, as with DDP. Every rank calls it.
void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options);

} // namespace gpt
