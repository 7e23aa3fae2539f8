#pragma once

// Internal: the parameters of one `fully_shard` call, sharded and unsharded.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/fsdp/group/group_gather.h>
#include <tessera/fsdp/group/group_shard.h>
#include <tessera/fsdp/group/model_resources.h>
#include <tessera/fsdp/group/place.h>
#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/layout/stages.h>
#include <tessera/offload/offload_memory.h>

namespace tessera::internal {

/// The module that a group was made for, as the group and the schedule see it. ShardedModule is the only one.
class GroupOwner {
 public:
  virtual ~GroupOwner() = default;

  /// What collectives and errors call it: the path of its module from the root, or the root's class.
  virtual std::string label() const = 0;
  /// The path of module `index` of those that share the group, from the root.
  virtual std::string path(size_t index) const = 0;
  /// Whether a read elsewhere frees the group between forward and backward.
  virtual bool reshards_after_forward() const = 0;
  /// An error that names a parameter of the model which was registered, and requires a gradient, since `fully_shard` took it.
  virtual void check_no_new_parameter() const = 0;
  /// A forward reads the group. Warns, once a model, where its policy has an output_dtype that no `tessera::call` applies.
  virtual void check_boundary() const = 0;
  /// A `tessera::call` of the module runs.
  virtual bool is_called() const = 0;
  /// The operator `name` rounds an activation in such a call, which FSDP2 would not do there. Warns, once a model.
  virtual void note_rounding(const std::string& name, at::ScalarType from, at::ScalarType to) const = 0;
  /// Whether `fully_shard` was told to leave `tensor` as it is, in this group's model.
  virtual bool ignores(const at::Tensor& tensor) const = 0;
};

class StepRecorder;

/// A parameter that a group is made from.
struct FreeParameter {
  at::Tensor tensor;
  Place place;
  at::ScalarType dtype = at::kFloat;                    ///< in which forward reads it
  std::optional<Placement> placement = {};              ///< that the program chose
  DeviceMesh mesh = {};                                 ///< that the program chose; undefined: the call's
  at::Tensor value = {};                                ///< whole; undefined: what the tensor has
  std::shared_ptr<GatherExtension> extension = nullptr; ///< null for none
  bool is_quantized = false;                            ///< its gather is
  SpecPtr parallel = {};                                ///< of a DTensor over foreign dims, whose part on this rank is `value`
  std::shared_ptr<const ReadMark> mark = nullptr;       ///< of such a DTensor that is of a kind

  const at::Tensor& values() const { return value.defined() ? value : tensor; }
};

/// Bytes of this rank's shard of a group of parameters.
int64_t shard_bytes_of(std::span<const FreeParameter> parameters, BufferLayout layout, const MeshRoles& roles);

/// Which of its module's groups a group is.
struct GroupPart {
  size_t number = 0;      ///< also its bucket's, where the strategy reduces in buckets
  bool is_beside = false; ///< its roles are not its module's: its parameters lie on other ranks, or every rank has them whole
};

/// One communication group: its parameters, their shard on this rank, and the gather that makes them whole.
///
/// Its parameters own it, together: it lives as long as any of them.
/// What takes a `Held` is done by one thread at a time. What takes none reads, or makes the group, which nobody else uses then.
/// `start_gather` and `finish_gather` are collective over the shard axis.
class ParameterGroup : public std::enable_shared_from_this<ParameterGroup> {
 public:
  ParameterGroup(std::shared_ptr<GroupOwner> owner, const MeshRoles& roles, Stages stages, const FullyShardOptions& options,
                 std::shared_ptr<ModelResources> resources);
  ~ParameterGroup();
  ParameterGroup(const ParameterGroup&) = delete;
  ParameterGroup& operator=(const ParameterGroup&) = delete;

  /// Takes over tensors: keeps this rank's part, in `memory` where it is not null, and turns each into a DTensor in place. Meta
  /// tensors get no memory until `materialize`. Tensors of other groups leave those groups, which must not be used any more. All
  /// tensors stay as they are where there is no memory for the shard.
  void shard(std::span<const FreeParameter> parameters, std::shared_ptr<OffloadMemory> memory = nullptr);
  /// Gives meta-device parameters uninitialized memory on the mesh's device, and leaves; nothing for others.
  void materialize();

  /// An error that names a parameter which its module gave up.
  void check_parameters_alive() const;
  /// Has the memory fetch what every read and every gradient of a parameter goes through.
  void prefetch_parameters() const;

  /// Starts to bring an offloaded shard to the device, for a gather that will come soon.
  void start_fetch(const Held& held);
  void start_gather(const Held& /*held*/) { gather_.start(); }
  /// The calling thread's current stream reads the unsharded parameters from here on.
  void finish_gather(const Held& /*held*/) { gather_.finish(); }
  /// The calling thread's current stream, or the thread itself where the shard is offloaded, writes it from here on, which a
  /// gather in flight may still read.
  void wait_to_write(const Held& /*held*/) { wait_for_readers(); }
  /// Frees the unsharded parameters.
  void reshard(const Held& /*held*/) { gather_.free(); }
  /// Keeps this rank's part for the stage that makes the next gather of such parts, where there is one.
  void reshard_after_forward(const Held& /*held*/) { gather_.free_after_forward(); }
  /// Frees what was kept after a forward. Gathers are from the shards from now on.
  void forget_after_forward(const Held& /*held*/);
  const GroupGather& gather() const { return gather_; }
  /// Makes parameter `index`, which its module gave up but somebody still holds, a DTensor that has nothing to do with the group.
  void release_parameter(size_t index);
  /// Copies this rank's part of the unsharded parameters in `written` to the shard (after a write to a leaf).
  /// An error where it may not be written.
  void write_back(const Held& held, const UnshardedRange& written);

  /// False for parameters on the meta device before `materialize`. (On a mesh of that device they have none after it either.)
  bool has_memory() const { return gather_.has_memory(); }
  bool is_open() const { return gather_.is_open(); }
  bool is_unsharded() const { return gather_.is_unsharded(); }
  /// Grows with every write to the shard.
  uint64_t shard_version() const { return shard_.version(); }
  /// The shard was written since the gather.
  bool is_stale() const { return needs_gather() && gather_.version() != shard_version(); }
  /// Whether an unshard communicates or copies at all; otherwise the leaves alias the shard.
  bool needs_gather() const { return gather_.is_needed(); }
  /// Bytes of the unsharded parameters while the group is gathered, whether or not it is now; 0 where nothing is copied.
  int64_t gathered_bytes() const { return needs_gather() ? layout_.unsharded_bytes : 0; }
  int64_t unsharded_bytes() const { return is_open() ? gathered_bytes() : 0; }

  /// What collectives and errors call it: its owner's, and which of its groups this is, from the second on.
  const std::string& label() const;
  const MeshRoles& roles() const { return roles_; }
  const Stages& stages() const { return stages_; }
  Stages& stages(const Held& /*held*/) { return stages_; }
  const FullyShardOptions& options() const { return options_; }
  const GroupLayout& layout() const { return layout_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  ModelMutex& mutex() const { return resources_->mutex; }
  BlockCache& cache() { return resources_->blocks; }
  const CommunicationStreams& streams() const { return resources_->streams; }
  StepRecorder* recorder() const { return resources_->recorder.get(); }
  /// The memory of shards, gradients and the optimizer's state; null where that is the device's own.
  const std::shared_ptr<OffloadMemory>& memory() const { return shard_.memory(); }
  /// Whether the shards lie elsewhere than what forward reads.
  bool is_off_device() const { return memory() && !roles_.mesh().device().is_cpu(); }
  /// Takes `place` in its model as it is now, and its shared resources; only while nothing is gathered or reduced. Drops a
  /// fetched copy.
  void attach(size_t place, std::shared_ptr<ModelResources> resources);
  /// The name from the root's module.
  std::string full_name(size_t index) const;

  const std::shared_ptr<GroupOwner> owner;
  size_t number = 0; ///< among the groups of its model, and its modules that have none; the same on every rank
  GroupPart part = {};

 private:
  friend class GroupGather; // what it gathers from
  bool differs_from_shard() const;
  void wait_for_readers();
  void allocate_shard(c10::Device device);
  void take_over_parameters();
  void make_leaves();
  void fill_shard(const std::vector<at::Tensor>& values);
  void check_is_gathered_as_it_is(const UnshardedRange& written);
  void add_parameter(const FreeParameter& free);
  void check_part(size_t index) const;

  MeshRoles roles_;
  Stages stages_;
  FullyShardOptions options_;
  mutable std::string label_; ///< empty until first needed in the model as it is now
  std::shared_ptr<ModelResources> resources_;
  GroupLayout layout_;
  std::vector<ShardedParameter> parameters_;
  GroupShard shard_;
  GroupGather gather_; ///< last: what it still reads of the others ends first
};

} // namespace tessera::internal
