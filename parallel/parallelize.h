#pragma once

#include <torch/nn/module.h>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/overlap.h>
#include <tessera/parallel/styles.h>

namespace tessera {

/// What `parallelize` is asked for beside the plan. The same on all ranks.
struct ParallelizeOptions {
  OverlapOptions overlap = {}; ///< of the layers that the plan splits
};

/// Tensor parallelism (PyTorch: parallelize_module): splits the parameters of `module` over the 1-D `mesh` as `plan` says, in
/// place, with the values of the mesh's first rank. All other parameters become replicated, and so do the running statistics of
/// norms. The module is then called as before, on every rank with the same plain tensors, or with DTensors: each operator that
/// reads a parameter brings the activations where the parameter's style wants them. What comes out is a DTensor. Gradients lie as
/// the parameters do.
///
/// From then on plain tensors beside DTensors of this mesh count as Replicate: masks, positions, targets. Between the styles
/// activations stay as they lie; where an operator cannot take them so they are made whole, which is an error under
/// StrictSharding.
///
/// Every rank of the mesh calls it, with the same plan, before `fully_shard` over other dims of the same root mesh and before an
/// optimizer has state. An error, before anything changes, for: a line that names no module (with the nearest name), a style that
/// does not fit the module, a parameter that two lines want to lie in two ways, a parameter of `fully_shard`, and sizes that the
/// ranks do not divide (with the numbers of ranks that do).
void parallelize(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options = {});

} // namespace tessera
