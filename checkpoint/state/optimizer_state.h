#pragma once

// Internal: the state of optimizers as state dict entries.

#include <tessera/checkpoint/state_dict.h>

namespace tessera::internal {

/// The entries of an optimizer in `state_dict(module, optimizer)`, with the binding that restores it. They begin with
/// "optimizer." where its name is empty, and with "optimizer.<name>." otherwise. Of the options `flatten_optimizer_state_dict`
/// and `prefix` count.
StateDict optimizer_state_dict(const torch::nn::Module& module, const NamedOptimizer& optimizer, const StateDictOptions& options);

} // namespace tessera::internal
