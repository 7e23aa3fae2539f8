#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/collectives/communicator.h>
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
  /// Returns when the unsharded parameters are there, or at once if the group was freed since. Throws an error of the gather.
  void wait();

 private:
  std::shared_ptr<internal::ShardedModule> state_;
};

/// Handle of a module that `fully_shard` took: FSDP2's FSDPModule methods. Copies share it. All calls are local unless noted.
class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<internal::ShardedModule> state) : state_(std::move(state)) {}

  /// Gathers this module's own group (not its children's). The group stays gathered until its parameters are read; then it is
  /// freed as usual. If nothing reads it, the end of the model's next backward frees it. Every rank of the shard dim calls it.
  void unshard();
  /// Starts the same and returns at once (FSDP2: `unshard(async_op=True)`). The handle waits for it, as the first read of a
  /// parameter does. Every rank of the shard dim calls it, in the same order among the model's gathers.
  UnshardHandle unshard_async();
  /// Frees the unsharded parameters of this module's own group.
  void reshard();
  /// false: backward keeps this rank's unsharded gradients (gradient accumulation without communication). For this module and,
  /// with `recurse`, those below it; `no_sync` is a scope of it. The gradients come to `grad()` when a backward with true has
  /// reduced them. Until then `grad()` is a tensor without values, and an optimizer that reads it gets an error. `zero_grad` of
  /// an optimizer or a module does not drop these gradients (as in FSDP2); that of this handle does, and so does an exception in
  /// a backward. As in FSDP2, the call also sets HSDP's all-reduce: true undoes an earlier `set_requires_all_reduce(false)`. In a
  /// `no_sync` scope both calls take effect at its end. With `recurse` they reach a module that another model has too, if it was
  /// sharded by itself. Every rank sets the same.
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);
  /// false: HSDP's all-reduce over the replicate dim is put off; the reduce-scatter still runs. Call it after
  /// `set_requires_gradient_sync`, which sets both. Every rank sets the same.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// Replaces the option `reshard_after_forward`, for this module and, with `recurse`, those below it. It replaces a number of
  /// ranks too: with true only this rank's shard is kept. A strategy that keeps parameters whole (ZeRO-1, ZeRO-2) still keeps
  /// them. Every rank sets the same.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  /// false: backward leaves this group gathered for the next forward; a write to a shard makes the next read gather it again. For
  /// this module and, with `recurse`, those below it. Every rank sets the same. (FSDP2: the same.)
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// false: the backward does not prefetch this module's own group, for modules whose backward does not read it, such as an
  /// embedding. If the backward reads it after all, it is gathered (in FSDP2 this would fail). Every rank sets the same.
  void set_unshard_in_backward(bool unshard_in_backward);
  /// The modules whose own groups a forward gathers as soon as it needs this module's group, in the order of the list. Without
  /// it, or with an empty list, these are the next groups of the recorded order of the last forward. An error if this module has
  /// no parameters of its own, or if a listed module belongs to another model. Every rank sets the same.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  /// Does the same for a backward, instead of the groups before this one in the recorded order.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// How many groups are gathered ahead when this module's own group is needed, and with `recurse` also when a group below it is,
  /// if no list is set: by default 1, and 0 for none. A larger number hides longer gathers behind the computation, and takes more
  /// memory. The first forward has no recorded order and follows that of the registered modules. An error for a negative
  /// number. Every rank sets the same.
  void set_prefetch_depth(int64_t groups, bool recurse = true);
  /// How many buffers of gradients there are at once in a backward, each of a group's size. 2, the default: one is filled while
  /// the other is sent. 1: a group's gradients wait until those of the group before have been reduced. For this module and, with
  /// `recurse`, those below it. An error for any other number. Every rank sets the same. (FSDP2 since 2.15, where the default is
  /// 1.)
  void set_reduce_scatter_max_input_buffers(int64_t buffers, bool recurse = true);
  /// false: another backward follows before the optimizer step. Unfinished reductions may stay in flight, and gradients that the
  /// strategy keeps whole (no-shard, ZeRO-1) are reduced only in the last backward. Gradients that are in flight or wait are not
  /// in `grad()` yet, as with `set_requires_gradient_sync`: nothing can read them, and only this handle's `zero_grad` drops them.
  /// It does not reach a module that another model sharded. A `fully_shard` of a module above takes a false over. Every rank sets
  /// the same.
  void set_is_last_backward(bool is_last_backward);
  /// Gives up an accumulation: clears the gradients of all parameters of this module and of those below it, and drops those that
  /// were accumulated and not reduced, also along a replicate dim, or are in flight. An optimizer's or a module's `zero_grad`
  /// keeps the latter. For a program that goes on after an exception in a forward. `grad()` becomes undefined, or zero without
  /// `set_to_none`. The settings stay: `set_is_last_backward(false)` and the like hold until they are set again. An error in a
  /// backward. Every rank calls it.
  void zero_grad(bool set_to_none = true);
  /// Divides the summed gradients of this module's own group by `factor` instead of the number of data-parallel ranks. It is
  /// positive, finite and the same on every rank. An error while gradients of the group are in flight, or wait for the
  /// all-reduce as a mean.
  void set_gradient_divide_factor(double factor);

  /// true: the gradients of this module and, with `recurse`, those below it are not reduced. `grad()` gets this rank's own, as a
  /// DTensor that is Partial along the dims that replicate (of a mean, or after `set_gradient_divide_factor` of a sum). So an
  /// optimizer that reduces them by itself, in fewer bits, finds them (`OneBitAdam`); any other, and clipping, gets the mean by a
  /// reduction of each. An error where parameters are sharded, which it names. Every rank sets the same.
  void set_keeps_own_gradients(bool keeps_own, bool recurse = true);

  /// Calls `hook` with the reduced gradients of this module's own group, whenever they are reduced: a flat tensor of the reduce
  /// dtype, this rank's part on the shard dim, with zeros between the parameters. The hook may change it in place, for example
  /// all-reduce it over ranks outside the mesh. It holds a mean, or a sum if a divide factor is set (in fp16 already divided by a
  /// power of two near the factor's root). The hook runs in backward, without grad mode. It may read the model, where the hooks
  /// of all ranks read alike, as that gathers; a backward of the model in it is an error. It must not own the model: that owns
  /// the hook, and a captured holder of the model would keep both forever. An exception of the hook ends the backward. An empty
  /// function removes the hook. The hooks of all ranks must communicate alike. An error while gradients of the group wait for
  /// their reduction. On a device with a `stream` the hook runs with this as the current one, after the reduction and beside the
  /// backward. An error for a stream of another device. (FSDP2: `set_all_reduce_hook`.)
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream = std::nullopt);
  /// All-gathers of this module's own group use `communicator` from now on. It may be a class of your own, and has the ranks of
  /// the shard dim in their order. Every rank of the shard dim sets one. One that is under way ends over the one
  /// before. An error if it is null or has other ranks, and if the group gathers nothing. Nothing for a module without a group.
  /// (FSDP2: `set_custom_all_gather`.)
  void set_custom_all_gather(CommunicatorPtr communicator);
  /// The same for the reduce-scatters of its gradients. An error while gradients of the group wait for their reduction.
  void set_custom_reduce_scatter(CommunicatorPtr communicator);

  /// true: from now on this rank records what the groups of the whole model do, for `report`. Each call with true starts the
  /// record anew. A `fully_shard` of a module above ends it; a `reshard_parameters` that changes groups starts it anew.
  void set_reporting(bool reports);
  /// What the groups of the whole model did since the last `report`, or since `set_reporting(true)`. An error without that call.
  /// Of the collectives it counts the gathers of parameters and the reductions of gradients. On a device the waits are those of
  /// the host, which leaves most of them to streams.
  StepReport report();

  const DeviceMesh& mesh() const;
  /// Full names, from the module given to `fully_shard`, of the parameters in its own group.
  std::vector<std::string> parameter_names() const;
  /// Bytes of unsharded parameters now allocated by this module's own group.
  int64_t unsharded_bytes() const;
  /// Bytes of the part of the parameters, larger than the shard, that this module's own group keeps to gather from: under
  /// Strategy::kHierarchical, and where `reshard_after_forward` is a number of ranks.
  int64_t kept_bytes() const;

  const std::shared_ptr<internal::ShardedModule>& state() const { return state_; }

 private:
  std::shared_ptr<internal::ShardedModule> state_;
};

} // namespace tessera
