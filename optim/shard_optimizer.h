#pragma once

#include <torch/optim/optimizer.h>

namespace tessera {

/// Shards the state that `optimizer` made before its parameters were sharded (steps taken, or Adagrad's constructor): each plain
/// tensor of a sharded parameter's state keeps this rank's part, laid out as the parameter (LBFGS's history, which is of all
/// parameters, stays whole on every rank). The state must have been the same on all ranks. State of parameters that
/// `reshard_parameters` moved is moved too: all ranks call it then. Any other state that is sharded already stays, as does that
/// of plain parameters. Otherwise local: no rank communicates.
///
/// For Adam, AdamW, SGD, RMSprop, Adagrad and LBFGS, and for classes that `register_optimizer` describes; an error names any
/// other class that holds state.
void shard_optimizer(torch::optim::Optimizer& optimizer);

} // namespace tessera
