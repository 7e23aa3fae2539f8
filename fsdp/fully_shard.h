#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/fsdp/step_report.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

namespace internal {
class ShardedModule;
}

/// A gather that `unshard_async` started. Dropped without `wait`, it is finished by the first read of a parameter.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::shared_ptr<internal::ShardedModule> state) : state_(std::move(state)) {}
  /// Returns when the unsharded parameters are there; at once where the group was freed since. An error of the gather is thrown.
  void wait();

 private:
  std::shared_ptr<internal::ShardedModule> state_;
};

/// Handle of a module that `fully_shard` took: FSDP2's FSDPModule methods. Copies share it. All calls are local unless noted.
class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<internal::ShardedModule> state) : state_(std::move(state)) {}

  /// Gathers this module's own group (not its children's). It stays so until it is read, and is then freed as after a forward or
  /// backward, or until the end of a backward of the model. Every rank of the shard dim calls it.
  void unshard();
  /// Starts the same and returns at once (FSDP2: `unshard(async_op=True)`). The handle waits for it, as the first read of a
  /// parameter does. Every rank of the shard dim calls it, in the same order among the model's gathers.
  UnshardHandle unshard_async();
  /// Frees the unsharded parameters of this module's own group.
  void reshard();
  /// false: backward keeps this rank's unsharded gradients (gradient accumulation without communication). For this module and,
  /// with `recurse`, those below it; `no_sync` is a scope of it. They come to `grad()` when a backward with true has reduced
  /// them. Until then a tensor without values stands there, which an optimizer cannot read: an error. So `zero_grad` does not
  /// drop them (FSDP2 too), and an exception in a backward does. As in FSDP2, the call sets HSDP's all-reduce likewise: true
  /// takes back a `set_requires_all_reduce(false)` from before. In a `no_sync` scope both calls count from its end on. With
  /// `recurse` they reach a module that another model has too, where it was sharded by itself.
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);
  /// false: HSDP's all-reduce over the replicate dim is put off; the reduce-scatter still runs. Call it after
  /// `set_requires_gradient_sync`, which sets both.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// Takes the place of the option `reshard_after_forward`, for this module and, with `recurse`, those below it: a number of
  /// ranks is forgotten, so that true leaves this rank's shard alone. A strategy that keeps parameters whole (ZeRO-1, ZeRO-2)
  /// does so with true as well. Every rank sets the same.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// false: the backward need not have this module's own group gathered, as an embedding's need not: nothing prefetches it there.
  /// A backward that reads it all the same gathers it (FSDP2 would compute with what is not there).
  void set_unshard_in_backward(bool unshard_in_backward);
  /// The modules whose own groups a forward gathers as soon as it needs this one's, in the order of the list, in place of the
  /// next ones of the order that the forward before recorded. An empty list takes this back. Every rank sets the same.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  /// The same for a backward, in place of those before this one in the recorded order.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// How many groups are gathered ahead when this module's own group is needed, and with `recurse` when one below it is, where no
  /// list says which: 1 unless set, 0 for none. More hide a longer gather behind the computation, and take their memory sooner.
  /// The first forward, which has no order yet, follows the order in which the modules are registered. Every rank sets the same.
  void set_prefetch_depth(int64_t groups, bool recurse = true);
  /// How many buffers of gradients there are at once in a backward, each of a group's size: 2 unless set, of which one is filled
  /// while the other is sent; or 1, so that a group's gradients wait until those of the group before have been reduced. For this
  /// module and, with `recurse`, those below it. Every rank sets the same. (FSDP2 since
  /// 2.15, with 1 unless set.)
  void set_reduce_scatter_max_input_buffers(int64_t buffers, bool recurse = true);
  /// false: another backward follows before the optimizer step; unfinished reductions may stay in flight, and gradients that the
  /// strategy keeps whole (no-shard, ZeRO-1) wait for the last backward before they are reduced. What is in flight or waits is
  /// not in `grad()` yet, as under `set_requires_gradient_sync`: nothing can read it, and `zero_grad` does not drop it. It does
  /// not reach a module that another model sharded.
  void set_is_last_backward(bool is_last_backward);
  /// Divides the summed gradients of this module's own group by `factor` instead of the number of data-parallel ranks. It is
  /// positive, finite and the same on every rank. An error while gradients of the group are in flight, or wait for the
  /// all-reduce as a mean.
  void set_gradient_divide_factor(double factor);

  /// Calls `hook` with the reduced gradients of this module's own group, whenever they are reduced: a flat tensor of the reduce
  /// dtype, this rank's part on the shard dim, with zeros between the parameters, which the hook may change in place: to
  /// all-reduce it over ranks that the mesh does not have, for example. It is a mean, or a sum where a divide factor is set (in
  /// fp16 a power of two near the factor's root is divided away before). It runs in backward and must not use the model. What it
  /// throws ends the backward. An empty function takes it back. Every rank sets one that communicates alike. (FSDP2:
  /// `set_all_reduce_hook`.)
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook);
  /// All-gathers of this module's own group run on `communicator` from now on, a class of the program's perhaps, which has the
  /// ranks of the shard dim in their order. Not while the group is being gathered. (FSDP2: `set_custom_all_gather`.)
  void set_custom_all_gather(CommunicatorPtr communicator);
  /// The same for the reduce-scatters of its gradients. Not while gradients are being reduced.
  void set_custom_reduce_scatter(CommunicatorPtr communicator);

  /// true: from now on this rank records what the groups of the whole model do, for `report`; from nothing, also where it did so
  /// already. A `fully_shard` of a module above ends that; a `reshard_parameters` that changes groups begins it anew.
  void set_reporting(bool reports);
  /// What the groups of the whole model did since the last `report`, or since `set_reporting(true)`: a step, where it is called
  /// after each. An error without that. Of collectives it counts the gathers of parameters and the reductions of gradients. On a
  /// device the waits are those of the host, which leaves most of them to streams.
  StepReport report();

  const DeviceMesh& mesh() const;
  /// Full names, from the module given to `fully_shard`, of the parameters in its own group.
  std::vector<std::string> parameter_names() const;
  /// Bytes of unsharded parameters now allocated by this module's own group.
  int64_t unsharded_bytes() const;

  const std::shared_ptr<internal::ShardedModule>& state() const { return state_; }

 private:
  std::shared_ptr<internal::ShardedModule> state_;
};

/// Shards the parameters of `module` that no earlier call claimed, as one communication group, in place (FSDP2: fully_shard).
///
/// Call it bottom-up: first the blocks, then the root; parameters that no call claimed stay plain, and their gradients local. A
/// parameter registered later is an error in the next forward, unless it is frozen or sharded as well. A module whose parameters
/// all belong to earlier calls gets no group, but its options hold in a `tessera::call` of it. `mesh` is 1-D (parameters
/// sharded over it) or 2-D (replicated over its first dim, sharded over its second: HSDP). Moves parameters and buffers to the
/// mesh's device. Every rank of the mesh calls it, in the same order with the same modules and options. Errors name the module
/// and the parameter. An error while the parameters are sharded, of no memory for example, leaves them as they are, or, where
/// some are sharded already, a model that cannot be used: each read of it is an error that says so.
FSDPModule fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& module, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

/// One group for the parameters of several modules.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {});

/// The same on a 1-D mesh of all ranks: of CUDA devices where this process has one, otherwise of CPUs (FSDP2: no `mesh`).
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& module, const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

/// Data parallel without sharding: every rank keeps the whole parameters, gradients are all-reduced (FSDP2: replicate). `mesh` is
/// 1-D; `mesh.flatten()` makes it so. Otherwise as `fully_shard`.
FSDPModule replicate(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule replicate(const torch::nn::ModuleHolder<Contained>& module, const DeviceMesh& mesh,
                     const FullyShardOptions& options = {}) {
  return replicate(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

/// The same on a 1-D mesh of all ranks, as for `fully_shard`.
FSDPModule replicate(torch::nn::Module& module, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule replicate(const torch::nn::ModuleHolder<Contained>& module, const FullyShardOptions& options = {}) {
  return replicate(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

/// The handle of a module that was sharded; an error for any other.
FSDPModule fsdp(const torch::nn::Module& module);
bool is_sharded(const torch::nn::Module& module);

} // namespace tessera
