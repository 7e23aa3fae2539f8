#pragma once

#include <tessera/parallel/moe.h>
#include <tessera/parallel/parallelize.h>

#include "common/sharding.h"
#include "gpt/model.h"
#include "gpt/options.h"

namespace gpt {

/// How tensor parallelism splits a Gpt, as Megatron does: attention by heads, the MLP by its inner features, the table by bytes.
/// With `sequence_parallel` the activations between are split over their time. Experts are no part of it.
tessera::ParallelPlan parallel_plan(bool sequence_parallel, bool has_experts);

/// Splits the experts of `module` over the innermost ranks of `mesh`, as many as ep and tp have. Returns the ranks with the same
/// experts, for `shard_experts`; undefined for a model without experts. Every rank calls it, before `parallelize`.
tessera::DeviceMesh split_experts(torch::nn::Module& module, const tessera::DeviceMesh& mesh, const Options& options);
/// Shards the experts of each block over the ranks with the same ones. Every rank calls it, before the rest is sharded.
void shard_experts(torch::nn::Module& module, const tessera::DeviceMesh& same, const Options& options);

/// Shards `model` over `mesh` as `options` say: over a dim tp its layers are split. Over the others every block is a group, and
/// what remains is the root's. Without sharding it is one call, as with DDP. Every rank calls it.
void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options);

} // namespace gpt
