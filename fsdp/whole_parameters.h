#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/fsdp/options.h>

namespace tessera {

/// A `shard_placement_fn` that does not split matrices, for optimizers that need whole ones (Muon, Shampoo). Each of `parameters`
/// with two dims or more is stored on one of the `ranks` of the shard dim: one after another, from the largest on, on the rank
/// that has least so far. The layout decides about the others. Give it the parameters of one `fully_shard` call, because a
/// group's gather takes the same size from each rank, that of the fullest. Equal shapes in the same order give the same result on
/// all ranks. On a 2-D mesh, `ranks` is the size of its last dim.
ShardPlacementFn whole_on_one_rank(const std::vector<at::Tensor>& parameters, int64_t ranks);

} // namespace tessera
