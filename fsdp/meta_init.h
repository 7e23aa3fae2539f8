#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/reads/construction_mode.h>

namespace tessera {

/// Runs `factory`, for example `[] { return Transformer(config); }`, with every new tensor on the meta device: the module has
/// shapes but no memory. Shard it, then call `materialize`. Local to the calling thread. Inside, `torch::tensor({…})` with
/// literal values is not possible: the values would have nowhere to go.
template <typename Factory>
auto on_meta(const Factory& factory) {
  const internal::ConstructOnMeta guard;
  return factory();
}

/// Gives the meta-device parameters and buffers of `module` memory on the mesh's device (sharded parameters only this rank's
/// part), uninitialized. Then calls `init` without grad mode, once on each module below it and on the module itself, on a module
/// after the modules below it (as Python's `Module.apply`). `init` sees sharded parameters and may use torch::nn::init,
/// `reset_parameters`, or `parameter.copy_(full_tensor)`. Every rank of the mesh calls it. On a mesh of the meta device (of a
/// fake or simulated process group) parameters and buffers stay without memory, and can be used all the same.
///
/// Returns the names of the parameters and buffers that got memory here, of which this rank holds elements, and that `init` did
/// not write: a load must still bring their values. If `init` throws, the next `materialize` on the same thread also returns the
/// names that it left unwritten. A group gets memory as a whole: its parameters that are not below `module` are returned as well,
/// by their full names from the root. Writes of operators count, writes through `data_ptr` do not.
std::vector<std::string> materialize(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& init);

} // namespace tessera
