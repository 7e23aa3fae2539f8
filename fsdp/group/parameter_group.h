#pragma once

// Internal: the parameters of one `fully_shard` call, sharded and unsharded.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/unsharded_storage.h>
#include <tessera/fsdp/group/extended_gather.h>
#include <tessera/fsdp/group/model_resources.h>
#include <tessera/fsdp/group/place.h>
#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/fsdp/layout/mesh_axes.h>
#include <tessera/fsdp/layout/shard_plan.h>
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
  /// Whether a touch elsewhere frees the group between forward and backward.
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
  at::Tensor value = {};                                ///< whole; undefined: what the tensor has
  std::shared_ptr<GatherExtension> extension = nullptr; ///< null for none
  SpecPtr parallel = {};                                ///< of a DTensor over foreign dims, whose part on this rank is `value`
  std::shared_ptr<const ReadMark> mark = nullptr;       ///< of such a DTensor that is of a kind

  const at::Tensor& values() const { return value.defined() ? value : tensor; }
};

/// Bytes of this rank's shard of a group of parameters.
int64_t shard_bytes_of(std::span<const FreeParameter> parameters, BufferLayout layout, const MeshAxes& axes);

/// One communication group: its shard, its unsharded storage, and the moves between them.
///
/// Its parameters own it, together: it lives as long as any of them.
/// Not thread-safe: the schedule's lock guards it. `start_gather` and `finish_gather` are collective over the shard axis.
class ParameterGroup : public std::enable_shared_from_this<ParameterGroup> {
 public:
  ParameterGroup(std::shared_ptr<GroupOwner> owner, const MeshAxes& axes, const FullyShardOptions& options,
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
  /// Keeps this rank's part among `neighbours`, from which the next gather is made, where there are any.
  void reshard_after_forward();
  void set_neighbours(CommunicatorPtr neighbours);
  /// Frees what was kept among them. Gathers are over all ranks from now on.
  void forget_neighbours();
  const CommunicatorPtr& neighbours() const { return neighbours_; }
  const ExtendedGather& extended() const { return extended_; }
  /// Makes parameter `index`, which its module gave up but somebody still holds, a DTensor that has nothing to do with the group.
  void release_parameter(size_t index);
  /// Copies this rank's part of the unsharded parameters in `written` to the shard (after a write to a leaf).
  /// An error where it may not be written.
  void write_back(const UnshardedRange& written);

  /// False for parameters on the meta device before `materialize`. (On a mesh of that device they have none after it either.)
  bool has_memory() const { return storage_.defined(); }
  bool is_open() const { return state_ != State::kSharded; }
  bool is_unsharded() const { return state_ == State::kUnsharded; }
  /// Grows with every write to the shard.
  uint64_t shard_version() const;
  /// The shard was written since the gather.
  bool is_stale() const { return copies_ && gathered_version_ != shard_version(); }
  /// Whether an unshard communicates or copies at all; otherwise the leaves alias the shard.
  bool copies() const { return copies_; }
  /// Bytes of the unsharded parameters while the group is gathered, whether or not it is now; 0 where nothing is copied.
  int64_t gathered_bytes() const { return copies_ ? layout_.unsharded_bytes : 0; }
  int64_t unsharded_bytes() const { return is_open() ? gathered_bytes() : 0; }
  /// The bytes of the part, larger than the shard, from which gathers are made.
  int64_t kept_bytes() const { return secondary_.defined() ? static_cast<int64_t>(secondary_.nbytes()) : 0; }

  /// What collectives and errors call it: its owner's, and which bucket of it this is, from the second on.
  const std::string& label() const;
  const MeshAxes& axes() const { return axes_; }
  MeshAxes& axes() { return axes_; }
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
  bool is_off_device() const { return memory_ && !axes_.mesh().device().is_cpu(); }
  /// Takes `place` in its model as it is now, and its shared resources; only while nothing is gathered or reduced. Drops a
  /// fetched copy.
  void settle(size_t place, std::shared_ptr<ModelResources> resources);
  /// The name from the root's module.
  std::string full_name(size_t index) const;

  const std::shared_ptr<GroupOwner> owner;
  size_t number = 0; ///< among the groups of its model, and its modules that have none; the same on every rank
  size_t bucket = 0; ///< its number among the groups of its module

 private:
  enum class State { kSharded, kGathering, kUnsharded };

  void enter(State next);
  void allocate_shard(c10::Device device);
  void take_over_parameters();
  void make_leaves();
  void fill_shard(const std::vector<at::Tensor>& values);
  at::Tensor unsharded_bytes_tensor() const;
  /// Parameter `index` in the unsharded storage; no leaf, so that reads and writes of it are unseen.
  at::Tensor whole_parameter(size_t index) const;
  /// `whole_parameter` with row-major strides, as the data lies before `restride_gathered`.
  at::Tensor row_major_parameter(size_t index) const;
  void check_no_extension(const UnshardedRange& written);
  void wait_for_first_collective();
  /// Of the gather that `gather` has started: what follows its first collective.
  void complete_gather();
  void drop_gather();
  void release_gathered();
  Work gather(const at::Tensor& unsharded);
  Work all_gather(Communicator& ranks, const at::Tensor& output, const at::Tensor& input) const;
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
  at::Tensor allocate_output(const at::Tensor& unsharded);
  Work gather_shards(const at::Tensor& output);
  Work gather_inside(const at::Tensor& output, const at::Tensor& input);
  void release_secondary();
  /// Whether `secondary_` was gathered from the current version of the shard.
  bool is_secondary_valid() const { return secondary_.defined() && secondary_version_ == shard_version(); }
  /// Bytes that a rank contributes to the all-gather.
  int64_t sent_bytes() const { return layout_.shard_bytes + extended_bytes_; }
  void add_parameter(const FreeParameter& free);
  void check_part(size_t index) const;
  void prepare_extended();
  void copy_out_extended(const at::Tensor& by_rank);
  void copy_out(const at::Tensor& gathered);
  void copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies);
  bool splits_rows() const;
  void split_rows(const at::Tensor& by_rank);

  MeshAxes axes_;
  FullyShardOptions options_;
  mutable std::string label_; ///< empty until first needed in the model as it is now
  std::shared_ptr<ModelResources> resources_;
  GroupLayout layout_;
  ShardPlan shard_plan_;
  std::vector<ShardedParameter> parameters_;

  std::shared_ptr<OffloadMemory> memory_;
  at::Tensor shard_;                           ///< bytes; the locals lie in it
  std::vector<c10::VariableVersion> versions_; ///< of the locals
  bool copies_ = true;
  c10::intrusive_ptr<UnshardedStorage> storage_;

  State state_ = State::kSharded;
  at::Tensor fetched_; ///< a copy of an offloaded shard, until it is gathered
  std::unique_ptr<PendingCopy> fetch_;
  Work fetching_; ///< what the copy that was started last is a part of
  uint64_t fetched_version_ = 0;
  at::Tensor gather_output_; ///< while gathering with a copy-out
  at::Tensor inner_output_;  ///< of the gather inside the inner group, which follows the one that is in flight
  Work gather_;
  bool has_told_outer_ = false;  ///< under the hierarchical strategy the other groups' ranks, that this one cannot gather
  bool completes_later_ = false; ///< by whoever reads it first: its wait blocks the host
  BlockUsers users_;             ///< of the unsharded storage
  ExtendedGather extended_;
  int64_t extended_bytes_ = 0;                   ///< of what a rank sends for these
  bool gathers_unsharded_parts_ = false;         ///< from what was unsharded before, with its strides
  std::optional<uint64_t> gathered_version_ = 0; ///< of the shard; none: what was gathered is not valid any more

  /// This rank's part of the unsharded parameters among fewer ranks than the shard axis has: those of the inner group of a
  /// hierarchical strategy, or the neighbours of a `reshard_after_forward` (ZeRO++: the secondary partition).
  at::Tensor secondary_;
  BlockUsers secondary_users_; ///< where it is that of neighbours; the other is written and read on the stream of gathers alone
  std::optional<uint64_t> secondary_version_; ///< of the shard that it was gathered from
  CommunicatorPtr neighbours_;
};

} // namespace tessera::internal
