#pragma once

#include <torch/optim/optimizer.h>

namespace tessera {

/// Shards the state that `optimizer` made before its parameters were sharded (in steps, or in Adagrad's constructor). Of each
/// plain tensor of a sharded parameter's state this rank's part is kept, with the placements of the parameter. (LBFGS's history
/// of all parameters stays whole on every rank.) The state must be the same on all ranks. State of parameters that
/// `reshard_parameters` moved is redistributed; then all ranks must call it. State that is already sharded stays, and so does the
/// state of plain parameters. Otherwise local: no rank communicates.
///
/// For Adam, AdamW, SGD, RMSprop, Adagrad and LBFGS, and for classes that `register_optimizer` describes; an error names any
/// other class that holds state.
void shard_optimizer(torch::optim::Optimizer& optimizer);

} // namespace tessera
