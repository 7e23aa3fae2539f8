#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

namespace fsdp_internal {
class ShardedModule;
}

/// Handle of a module that `fully_shard` took: FSDP2's FSDPModule methods. Copies share it. All calls are local unless noted.
class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<fsdp_internal::ShardedModule> state) : state_(std::move(state)) {}

  /// Gathers this module's own group (not its children's). Every rank of the shard dim calls it.
  void unshard();
  /// Frees the unsharded parameters of this module's own group.
  void reshard();
  /// false: backward keeps this rank's unsharded gradients (gradient accumulation without communication). For this module and,
  /// with `recurse`, those below it. They are not in `grad()` until a backward with true has reduced them; so `zero_grad` does
  /// not drop them (FSDP2 too), and an exception in a backward does.
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);
  /// false: HSDP's all-reduce over the replicate dim is put off; the reduce-scatter still runs.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// false: another backward follows before the optimizer step; unfinished reductions may stay in flight.
  void set_is_last_backward(bool is_last_backward);
  /// Divides the summed gradients of this module's own group by `factor`, which is positive and the same on every rank, instead
  /// of the number of data-parallel ranks. An error while gradients of the group are in flight, or wait for the all-reduce as a
  /// mean.
  void set_gradient_divide_factor(double factor);

  const DeviceMesh& mesh() const;
  /// Full names, from the module given to `fully_shard`, of the parameters in its own group.
  std::vector<std::string> parameter_names() const;
  /// Bytes of unsharded parameters now allocated by this module's own group.
  int64_t unsharded_bytes() const;

  const std::shared_ptr<fsdp_internal::ShardedModule>& state() const { return state_; }

 private:
  std::shared_ptr<fsdp_internal::ShardedModule> state_;
};

/// Shards the parameters of `module` that no earlier call claimed, as one communication group, in place (FSDP2: fully_shard).
///
/// Call it bottom-up: first the blocks, then the root; parameters that no call claimed stay plain, and their gradients local. A
/// parameter registered later is an error in the next forward, unless it is frozen or sharded as well. `mesh` is 1-D (parameters
/// sharded over it) or 2-D (replicated over its first dim, sharded over its second: HSDP). Moves parameters and buffers to the
/// mesh's device. Every rank of the mesh calls it, in the same order with the same modules and options. Errors name the module
/// and the parameter.
FSDPModule fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& module, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

/// One group for the parameters of several modules.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {});

/// Data parallel without sharding: every rank keeps the whole parameters, gradients are all-reduced (FSDP2: replicate).
FSDPModule replicate(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

/// The handle of a module that was sharded; an error for any other.
FSDPModule fsdp(const torch::nn::Module& module);
bool is_sharded(const torch::nn::Module& module);

} // namespace tessera
