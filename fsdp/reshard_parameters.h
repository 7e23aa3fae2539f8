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
  std::vector<std::string> added;   ///< an optimizer that should train them has to be built anew
  std::vector<std::string> removed; ///< replaced ones are added too; an optimizer that still has them trains what no module reads
  std::vector<std::string> moved;   ///< kept, but in other parts or of another dtype: call `shard_optimizer` for their state
};

/// Makes a sharded model, whose parameters were added to, replaced or removed since `fully_shard`, what `fully_shard` would have
/// made of it as it is now: adapters (LoRA) after sharding, other heads, another dtype. `module` is the model's root, or what
/// holds it.
///
/// New parameters belong to the next sharded module above them, with its options; a `shard_placement_fn` is not asked again. A
/// group whose parameters are the same stays as it is. Another one is gathered once, whole and in its own dtype, and split anew;
/// its parameters stay the tensors that they are. Handles, divide factors, hooks, communicators and prefetch lists stay. A module
/// that had no parameters of its own reduces the new ones' gradients as the next one above that has some is set to.
///
/// All ranks of the model call it at the same point, after the same changes, between steps: gradients have to be reduced and
/// cleared. A model of whose sharded parameters none is left is `fully_shard`'s again. New parameters have the same values on all
/// ranks, or what `initial_weights` of the root says. A graph from before is an error in its backward. Where nothing changed, it
/// costs one small collective a mesh. An error amid the changes, of a full disk for example, leaves a model that cannot be used:
/// each read of it is an error that says so.
ReshardedParameters reshard_parameters(torch::nn::Module& module, const ReshardParametersOptions& options = {});

template <typename Contained>
ReshardedParameters reshard_parameters(const torch::nn::ModuleHolder<Contained>& module,
                                       const ReshardParametersOptions& options = {}) {
  return reshard_parameters(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

} // namespace tessera
