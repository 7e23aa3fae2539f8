#pragma once

// Internal: the parameters of one `fully_shard` call, sharded and unsharded.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/unsharded_storage.h>
#include <tessera/fsdp/communication/gather_message.h>
#include <tessera/fsdp/group/extended_gather.h>
#include <tessera/fsdp/group/gather_state.h>
#include <tessera/fsdp/group/model_resources.h>
#include <tessera/fsdp/group/place.h>
#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/layout/shard_plan.h>
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

/// One communication group: its shard, its unsharded storage, and the moves between them.
///
/// Its parameters own it, together: it lives as long as any of them.
/// Not thread-safe: the schedule's lock guards it. `start_gather` and `finish_gather` are collective over the shard axis.
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
  void start_fetch();
  void start_gather();
  /// The calling thread's current stream reads the unsharded parameters from here on.
  void finish_gather();
  /// The calling thread's current stream, or the thread itself where the shard is offloaded, writes it from here on, which a
  /// gather in flight may still read.
  void wait_to_write();
  /// Frees the unsharded parameters.
  void reshard();
  /// Keeps this rank's part for the stage that makes the next gather of such parts, where there is one.
  void reshard_after_forward();
  /// Frees what was kept after a forward. Gathers are from the shards from now on.
  void forget_after_forward();
  const ExtendedGather& extended() const { return extended_; }
  /// Empty where the gathers are not quantized.
  const GatherMessages& messages() const { return messages_; }
  /// Bytes of what gather `stage` makes, in the measure of `CollectiveCounters`.
  int64_t gather_payload(size_t stage) const;
  /// Makes parameter `index`, which its module gave up but somebody still holds, a DTensor that has nothing to do with the group.
  void release_parameter(size_t index);
  /// Copies this rank's part of the unsharded parameters in `written` to the shard (after a write to a leaf).
  /// An error where it may not be written.
  void write_back(const UnshardedRange& written);

  /// False for parameters on the meta device before `materialize`. (On a mesh of that device they have none after it either.)
  bool has_memory() const { return storage_.defined(); }
  bool is_open() const { return !std::holds_alternative<Sharded>(state_); }
  bool is_unsharded() const { return std::holds_alternative<Unsharded>(state_); }
  /// Grows with every write to the shard.
  uint64_t shard_version() const;
  /// The shard was written since the gather.
  bool is_stale() const { return needs_gather_ && gathered_version_ != shard_version(); }
  /// Whether an unshard communicates or copies at all; otherwise the leaves alias the shard.
  bool needs_gather() const { return needs_gather_; }
  /// Bytes of the unsharded parameters while the group is gathered, whether or not it is now; 0 where nothing is copied.
  int64_t gathered_bytes() const { return needs_gather_ ? layout_.unsharded_bytes : 0; }
  int64_t unsharded_bytes() const { return is_open() ? gathered_bytes() : 0; }
  /// The bytes of the parts, larger than the shard, from which gathers are made.
  int64_t kept_bytes() const;

  /// What collectives and errors call it: its owner's, and which of its groups this is, from the second on.
  const std::string& label() const;
  const MeshRoles& roles() const { return roles_; }
  const Stages& stages() const { return stages_; }
  Stages& stages() { return stages_; }
  const FullyShardOptions& options() const { return options_; }
  const GroupLayout& layout() const { return layout_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  BlockCache& cache() { return resources_->blocks; }
  const CommunicationStreams& streams() const { return resources_->streams; }
  StepRecorder* recorder() const { return resources_->recorder.get(); }
  /// The memory of shards, gradients and the optimizer's state; null where that is the device's own.
  const std::shared_ptr<OffloadMemory>& memory() const { return memory_; }
  /// Whether the shards lie elsewhere than what forward reads.
  bool is_off_device() const { return memory_ && !roles_.mesh().device().is_cpu(); }
  /// Takes `place` in its model as it is now, and its shared resources; only while nothing is gathered or reduced. Drops a
  /// fetched copy.
  void attach(size_t place, std::shared_ptr<ModelResources> resources);
  /// The name from the root's module.
  std::string full_name(size_t index) const;

  const std::shared_ptr<GroupOwner> owner;
  size_t number = 0;      ///< among the groups of its model, and its modules that have none; the same on every rank
  size_t bucket = 0;      ///< its number among the groups of its module
  bool is_beside = false; ///< its roles are not its module's: its parameters lie on other ranks, or every rank has them whole

 private:
  bool is_sharded() const { return !is_open(); }
  void enter(GatherState next);
  void allocate_shard(c10::Device device);
  void take_over_parameters();
  void make_leaves();
  void fill_shard(const std::vector<at::Tensor>& values);
  at::Tensor unsharded_bytes_tensor() const;
  /// Parameter `index` in the unsharded storage; no leaf, so that reads and writes of it are unseen.
  at::Tensor whole_parameter(size_t index) const;
  /// `whole_parameter` with row-major strides, as the data lies before `restride_gathered`.
  at::Tensor row_major_parameter(size_t index) const;
  void check_is_gathered_as_it_is(const UnshardedRange& written);
  void wait_for_first_stage(Gathering& gathering);
  /// Runs the stages after the first, and copies what they have gathered to where it is read.
  void complete_gather(Gathering& gathering);
  void drop_gather();
  Work start_first_stage(Gathering& gathering);
  Work gather_stage(size_t stage, const at::Tensor& output, const at::Tensor& input);
  Work gather_messages(size_t stage, const at::Tensor& output, const at::Tensor& input);
  MessageRanks message_ranks(size_t stage) const;
  /// Gives the parameters that were gathered row-major their strides.
  void restride_gathered();
  void fill_replicated(const at::Tensor& unsharded);
  void cast_into(const at::Tensor& destination);
  /// The shard on the device.
  const at::Tensor& fetched_shard();
  at::Tensor fetched_local(size_t index) const;
  void try_fetch();
  void tell_failure(const std::string& failure);
  template <typename Allocate>
  auto allocate_or_tell(int64_t bytes, const Allocate& allocate);
  c10::DataPtr allocate_to_gather(int64_t bytes);
  at::Tensor allocate_output();
  const at::Tensor& output_of(size_t stage, const Gathering& gathering);
  at::Tensor own_part_to_send(const at::Tensor& output);
  void give_up_after(size_t stage, const std::string& cause) const;
  /// What the last stage starts from that a forward leaves; null where no stage does.
  KeptPart* part_after_forward() { return stages_.has_after_forward() ? &kept_.back() : nullptr; }
  bool is_valid(const KeptPart& part) const { return part.value.defined() && part.is_of(shard_version()); }
  /// The stage with which a gather begins: the last one whose part is valid, or the first.
  size_t first_stage() const;
  /// Bytes that a rank contributes to the first stage.
  int64_t sent_bytes() const { return layout_.shard_bytes + extended_.bytes(); }
  void add_parameter(const FreeParameter& free);
  void check_part(size_t index) const;
  void prepare_extended();
  void copy_out_extended(const at::Tensor& by_rank);
  void copy_out(const at::Tensor& gathered);
  void copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies);
  bool splits_rows() const;
  void split_rows(const at::Tensor& by_rank);

  MeshRoles roles_;
  Stages stages_;
  FullyShardOptions options_;
  mutable std::string label_; ///< empty until first needed in the model as it is now
  std::shared_ptr<ModelResources> resources_;
  GroupLayout layout_;
  ShardPlan shard_plan_;
  std::vector<ShardedParameter> parameters_;

  std::shared_ptr<OffloadMemory> memory_;
  at::Tensor shard_;                           ///< bytes; the locals lie in it
  std::vector<c10::VariableVersion> versions_; ///< of the locals
  bool needs_gather_ = true;
  c10::intrusive_ptr<UnshardedStorage> storage_;

  GatherState state_;
  BlockUsers users_; ///< of the unsharded storage
  ShardFetch fetch_;
  ExtendedGather extended_;
  GatherMessages messages_;
  std::vector<KeptPart> kept_;                   ///< one a stage of gathers; the first stage has none
  std::optional<uint64_t> gathered_version_ = 0; ///< of the shard; none: what was gathered is not valid any more
};

} // namespace tessera::internal
