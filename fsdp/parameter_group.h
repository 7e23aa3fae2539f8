#pragma once

// Internal: the parameters of one `fully_shard` call, sharded and unsharded.

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/fsdp/block_cache.h>
#include <tessera/fsdp/group_gradients.h>
#include <tessera/fsdp/group_layout.h>
#include <tessera/fsdp/memory_range.h>
#include <tessera/fsdp/mesh_axes.h>
#include <tessera/fsdp/unsharded_storage.h>

namespace tessera::fsdp_internal {

class ShardedModule;

/// A parameter's name, after what is said about it ("the gradient of ").
class ParameterName final : public TensorName {
 public:
  ParameterName(const char* about, std::weak_ptr<ParameterGroup> group, size_t index)
      : about_(about), group_(std::move(group)), index_(index) {}
  std::string to_string() const override;

 private:
  const char* about_;
  std::weak_ptr<ParameterGroup> group_;
  size_t index_;
};

/// The meta of a sharded parameter: a DTensor that knows its group.
struct ParameterMeta : DTensorMeta {
  ParameterMeta(at::Tensor local, SpecPtr spec, ParameterGroup* owner, size_t position)
      : DTensorMeta(std::move(local), std::move(spec)), group(owner), index(position) {}
  ParameterGroup* group; ///< null once all parameters of the group are gone: a detached copy may live longer
  size_t index;
};

/// The meta of a sharded parameter or of a shallow copy of one (`detach`, `data`); null for any other tensor.
inline ParameterMeta* parameter_meta(const at::TensorBase& tensor) {
  constexpr auto both = c10::DispatchKeySet({kDTensorKey, kTouchKey});
  if (!tensor.defined() || !tensor.key_set().has_all(both)) return nullptr;
  auto* meta = static_cast<ParameterMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return meta->group ? meta : nullptr;
}

struct ShardedParameter {
  std::string name;                                ///< full name from the module given to `fully_shard`
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor; ///< what the module and the optimizer hold
  at::Tensor leaf;                                 ///< what forward ops read instead: plain, in the unsharded dtype
  at::Tensor detached_leaf;                        ///< the same memory for `detach()`ed reads
  at::Tensor dtensor_leaf;                         ///< stands for it among DTensors in grad mode; made when first needed
  NodeReference accumulator;                       ///< of the gradients of `leaf` and of `tensor`
  SpecPtr spec;
  c10::intrusive_ptr<ParameterMeta> meta;
  c10::intrusive_ptr<const TensorName> gradient_name;
  std::optional<MemoryRange> original; ///< where the whole tensor was
  at::Tensor local;                    ///< this rank's part, a view of the shard
  bool touched = false;                ///< read in this forward with a gradient to come
};

/// One communication group: its shard, its unsharded storage, and the moves between them.
///
/// Its parameters own it, together: it lives as long as any of them.
/// Not thread-safe: the schedule's lock guards it. `start_gather` and `finish_gather` are collective over the shard axis.
class ParameterGroup : public std::enable_shared_from_this<ParameterGroup> {
 public:
  ParameterGroup(std::string label, const MeshAxes& axes, const FullyShardOptions& options, std::shared_ptr<BlockCache> cache);
  ~ParameterGroup();
  ParameterGroup(const ParameterGroup&) = delete;
  ParameterGroup& operator=(const ParameterGroup&) = delete;

  /// Takes over `tensors`: keeps this rank's part and turns each into a DTensor in place. Meta tensors get no memory until
  /// `materialize`.
  void shard(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names);
  /// Gives meta-device parameters uninitialized memory on the mesh's device; nothing for others.
  void materialize();

  /// An error that names a parameter which its module gave up.
  void check_parameters_alive() const;
  /// Has the memory fetch what every read and every gradient of a parameter goes through.
  void prefetch_parameters() const;

  void start_gather();
  void finish_gather();
  /// Frees the unsharded parameters.
  void reshard();
  /// Copies this rank's part of the unsharded parameters to the shard (after a write to a leaf).
  void write_back();

  /// Parameter `index` was read in forward number `forward`, with a gradient to come; another number forgets those of the one
  /// before.
  void expect_gradient(size_t index, uint64_t forward);
  /// How many parameters expect a gradient.
  size_t touched_count() const { return touched_count_; }

  bool is_open() const { return state_ != State::kSharded; }
  bool is_unsharded() const { return state_ == State::kUnsharded; }
  /// The shard was written since the gather.
  bool is_stale() const { return copies_ && gathered_version_ != shard_version(); }
  /// A DTensor op is about to write parameter `index` through `tensor`: it runs below the dispatch level that counts versions.
  /// As in an unsharded model, what autograd saved of the parameter can be used no more, unless it was written through `data()`.
  void note_write(const at::Tensor& tensor, size_t index);
  /// Whether an unshard communicates or copies at all; otherwise the leaves alias the shard.
  bool copies() const { return copies_; }
  int64_t unsharded_bytes() const { return copies_ && is_open() ? layout_.unsharded_bytes : 0; }

  const std::string& label() const { return label_; }
  void set_label(std::string label) { label_ = std::move(label); }
  const MeshAxes& axes() const { return axes_; }
  const FullyShardOptions& options() const { return options_; }
  const GroupLayout& layout() const { return layout_; }
  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  GroupGradients& gradients() { return *gradients_; }
  BlockCache& cache() { return *cache_; }
  std::string full_name(size_t index) const { return parameters_[index].name; }

  std::shared_ptr<ShardedModule> owner; ///< the state of the module that the group was made for
  int64_t number = 0;                   ///< among the groups of its model, the same on every rank
  // Kept by the schedule:
  int64_t order_position = -1;   ///< in the recorded forward order
  uint64_t recorded_forward = 0; ///< the last forward that recorded it there
  uint64_t phase = 0;            ///< the last phase (forward or backward) that saw a read of this group
  bool is_listed = false;        ///< among those whose gradients are unfinished

 private:
  enum class State { kSharded, kGathering, kUnsharded };

  uint64_t shard_version() const { return shard_._version() + dtensor_writes_; }
  void allocate_shard(c10::Device device);
  void make_leaves();
  void fill_shard(const std::vector<at::Tensor>& values);
  at::Tensor unsharded_bytes_tensor() const;
  void fill_replicated(const at::Tensor& unsharded);
  void cast_into(const at::Tensor& destination);
  void copy_out(const at::Tensor& gathered);

  std::string label_;
  MeshAxes axes_;
  FullyShardOptions options_;
  std::shared_ptr<BlockCache> cache_;
  GroupLayout layout_;
  std::vector<ShardedParameter> parameters_;
  std::unique_ptr<GroupGradients> gradients_;

  at::Tensor shard_;                    ///< bytes; the locals are views of it
  std::vector<int64_t> master_offsets_; ///< bytes, of each local inside the shard
  bool casts_ = false;                  ///< some parameter's unsharded dtype differs from its own
  bool copies_ = true;
  c10::intrusive_ptr<UnshardedStorage> storage_;

  State state_ = State::kSharded;
  at::Tensor gather_output_; ///< while gathering with a copy-out
  Work gather_;
  uint64_t gathered_version_ = 0;
  uint64_t dtensor_writes_ = 0;
  uint64_t touched_forward_ = 0;
  size_t touched_count_ = 0;
};

} // namespace tessera::fsdp_internal
