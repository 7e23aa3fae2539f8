#pragma once

#include <torch/optim/optimizer.h>

namespace tessera {

/// Shards the state that `optimizer` made before its parameters were sharded (steps taken, or Adagrad's constructor): each plain
/// tensor of a sharded parameter's state keeps this rank's part, laid out as the parameter. State that is sharded already and
/// state of plain parameters stays. Local: no rank communicates; the state must have been the same on all ranks.
///
/// For Adam, AdamW, SGD, RMSprop and Adagrad; an error names any other class that holds state.
void shard_optimizer(torch::optim::Optimizer& optimizer);

} // namespace tessera
