#pragma once

#include <tessera/mesh/device_mesh.h>

#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/text.h"

namespace gpt {

/// The ranks of a job: those over which parameters are sharded and layers split, which are all, and those that split this rank's
/// sequences.
struct Meshes {
  tessera::DeviceMesh parameters;      ///< its last dim may be tp; undefined without a strategy
  tessera::DeviceMesh context;         ///< undefined with --context-ranks 1
  bool has_tensor_parallelism = false; ///< activations are DTensors of tp
};
/// Every rank calls it.
Meshes make_meshes(const Options& options);

/// This rank's loss of a batch, of which the mean over all ranks is that of all bytes. Where sequences are split, the batch is
/// that of the ranks that split them, and this rank computes its part of each.
torch::Tensor loss_of(Gpt& model, const Batch& batch, const Meshes& meshes, tessera::ContextParallel scheme);

} // namespace gpt
