#pragma once

// Internal: the state of LibTorch's optimizers as state dict entries.

#include <tessera/checkpoint/state_dict.h>

namespace tessera {

/// The "optimizer.…" entries of `state_dict(module, optimizer)`, with the binding that restores the optimizer. `flatten`: the
/// options are named by parameter, otherwise by group.
StateDict optimizer_state_dict(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, bool flatten);

} // namespace tessera
