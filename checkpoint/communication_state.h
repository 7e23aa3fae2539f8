#pragma once

#include <tessera/checkpoint/state_dict.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// What the reductions of a sharded module's gradients keep from one step to the next (`FullyShardOptions::communication`): what
/// the codes have lacked, PowerSGD's matrices. Merge it into the state dict of the model and the optimizer, so that a resumed
/// training goes on as if it had not been stopped. The entries are "communication.policy", "communication.ranks", and
/// "communication.<path of the module>.<name>", [ranks, …]: a row belongs to its rank. Empty where nothing is kept; a `Trainer`
/// adds it by itself.
///
/// A load from a checkpoint of another number of ranks or of another policy is an error: load a state dict without it, with
/// `LoadOptions::allow_unused`, to begin with zeros. From a checkpoint that has none it begins with zeros as well. Every rank
/// calls it between two steps, without gradients that wait for their reduction. In a pipeline (a dim `pp` of the mesh) the names
/// are "communication.pp_<rank of the dim>.group_<number>.<name>", and a load needs the same stages.
StateDict communication_state(const torch::nn::Module& module);

} // namespace tessera
