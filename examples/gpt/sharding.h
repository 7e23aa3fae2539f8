#pragma once

#include <tessera/parallel/parallelize.h>

#include "common/sharding.h"
#include "gpt/model.h"
#include "gpt/options.h"

namespace gpt {

/// How tensor parallelism splits a Gpt, as Megatron does: attention by heads, the MLP by its inner features, the table by bytes.
/// With `sequence_parallel` the activations between are split over their time.
tessera::ParallelPlan parallel_plan(bool sequence_parallel);

/// Shards `model` over `mesh` as `options` say: over a dim tp its layers are split. Over the others every block is a group, and
/// what remains is the root's. Without sharding it is one call, as with DDP. Every rank calls it.
void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options);

} // namespace gpt
