#pragma once

#include <tessera/mesh/device_mesh.h>

#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/text.h"

namespace gpt {

/// The ranks of a job: those over which parameters are sharded, which are all, and those that split this rank's sequences.
struct Meshes {
  tessera::DeviceMesh parameters; ///< undefined without a strategy
  tessera::DeviceMesh context;    ///< undefined with --context-ranks 1
};
/// Every rank calls it.
Meshes make_meshes(const Options& options);

/// This rank's loss of a batch, of which the mean over all ranks is that of all bytes. With a `context` the batch is that of its
/// ranks, and this rank computes its part of each sequence.
torch::Tensor loss_of(Gpt& model, const Batch& batch, const tessera::DeviceMesh& context, tessera::ContextParallel scheme);

} // namespace gpt
