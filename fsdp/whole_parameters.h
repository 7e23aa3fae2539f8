#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/fsdp/options.h>

namespace tessera {

/// A `shard_placement_fn` that leaves matrices whole, for optimizers that need them so (Muon, Shampoo): each of `parameters` with
/// two dims or more lies on one of the `ranks` of the shard dim, the largest first on the rank that has least. Others are left to
/// the layout. Give it the parameters of one `fully_shard` call: a group's gather takes as much from each rank as the fullest
/// has. Ranks that make it from the same shapes in the same order get the same.
ShardPlacementFn whole_on_one_rank(const std::vector<at::Tensor>& parameters, int64_t ranks);

} // namespace tessera
