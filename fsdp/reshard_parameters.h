#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct ReshardParametersOptions {
  /// The dtype of the floating-point parameters and buffers from now on, as `Module::to` gives it to a plain module. Unset: as
  /// they are. An error, before any change, for a norm that would compute with a weight and running statistics of two dtypes.
  std::optional<c10::ScalarType> dtype;
  /// Parameters that stay as they are, beside those that `fully_shard` was told to ignore.
  std::vector<at::Tensor> ignored_params = {};
};

/// What `reshard_parameters` did, as full names from the module of the root.
struct ReshardedParameters {
  std::vector<std::string> added;   ///< build an optimizer that should train them again
  std::vector<std::string> removed; ///< replaced ones are added too; an optimizer that still has them trains what no module reads
  std::vector<std::string> moved;   ///< kept, but in other parts or of another dtype: call `shard_optimizer` for their state
};

/// Shards a model again after its parameters were added, replaced or removed: adapters (LoRA) after sharding, other heads,
/// another dtype. The groups are then those that `fully_shard` would make of the changed model. `module` is the model's root, or
/// a module that contains it.
///
/// New parameters join the group of the nearest sharded module above them, with its options; a `shard_placement_fn` is not called
/// again, so that new ones lie on the ranks of the call, and are the same there. A group whose parameters did not change stays as
/// it is. A changed group is gathered once, whole and in its own dtype, and split again; its parameters stay the same tensor
/// objects. Handles, divide factors, hooks, communicators and prefetch lists stay. A module that had no parameters of its own
/// reduces the gradients of new ones with the settings of the nearest module above it that has some.
///
/// All ranks of the model call it at the same point, after the same changes, between steps: gradients must be reduced and
/// cleared. If no sharded parameter is left, call `fully_shard` again instead. New parameters have the same values on all ranks,
/// unless `initial_weights` of the root says otherwise. The backward of a graph from before is an error. If nothing changed, it
/// costs one small collective for each mesh, and one more where a `shard_placement_fn` chose meshes. After an error during the
/// changes, for example of a full disk, the model cannot be used: each read of it is an error that says so.
ReshardedParameters reshard_parameters(torch::nn::Module& module, const ReshardParametersOptions& options = {});

template <typename Contained>
ReshardedParameters reshard_parameters(const torch::nn::ModuleHolder<Contained>& module,
                                       const ReshardParametersOptions& options = {}) {
  return reshard_parameters(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

} // namespace tessera
