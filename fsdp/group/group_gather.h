#pragma once

// Internal: the unsharded parameters of a group, from their gather until they are freed.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/unsharded_storage.h>
#include <tessera/fsdp/communication/extended_gather.h>
#include <tessera/fsdp/communication/gather_message.h>
#include <tessera/fsdp/group/gather_state.h>

namespace tessera::internal {

class ParameterGroup;

/// The memory of a group's unsharded parameters, and the stages that fill it from the shards of all ranks.
///
/// A part of its group. `start` and `finish` are collective over the shard axis.
class GroupGather {
 public:
  /// The gather of `group`, which has it, by so many stages.
  GroupGather(ParameterGroup& group, size_t stages) : group_(group), kept_(stages) {}
  ~GroupGather();
  GroupGather(const GroupGather&) = delete;
  GroupGather& operator=(const GroupGather&) = delete;

  /// Parameter `index` is sent as `extension` says.
  void extend(size_t index, std::shared_ptr<GatherExtension> extension) { extended_.add(index, std::move(extension)); }
  void send_messages(GatherMessages messages) { messages_ = std::move(messages); }
  /// Whether a gather communicates or copies at all. Otherwise the leaves alias the shard.
  void set_needed(bool is_needed) { is_needed_ = is_needed; }
  bool is_needed() const { return is_needed_; }
  /// Makes the storage of the unsharded parameters: empty, or where no gather is needed the memory of `shard`.
  void make_storage(const at::Tensor& shard);

  /// False for parameters on the meta device before `materialize`. (On a mesh of that device they have none after it either.)
  bool has_memory() const { return storage_.defined(); }
  bool is_open() const { return !std::holds_alternative<Sharded>(state_); }
  bool is_unsharded() const { return std::holds_alternative<Unsharded>(state_); }
  const c10::intrusive_ptr<UnshardedStorage>& storage() const { return storage_; }
  const ExtendedGather& extended() const { return extended_; }
  /// Empty where the gathers are not quantized.
  const GatherMessages& messages() const { return messages_; }
  /// The version of the shard that was gathered last; none where that is not valid any more.
  std::optional<uint64_t> version() const { return version_; }
  void set_version(std::optional<uint64_t> version) { version_ = version; }

  /// Whether the next gather takes what this rank sends from its shard.
  bool takes_shard() const { return first_stage() == 0; }
  void start();
  /// The calling thread's current stream reads the unsharded parameters from here on.
  void finish();
  /// The calling thread's current stream comes after those that use the unsharded parameters.
  void join_users() { users_.join(); }
  void free();
  /// Keeps this rank's part for the stage that makes the next gather of such parts, where there is one.
  void free_after_forward();
  /// Frees what was kept after a forward, and forgets the stage that took it. Returns whether there was one, which is the group's
  /// last.
  bool forget_after_forward();
  /// The bytes of the parts, larger than the shard, from which gathers are made.
  int64_t kept_bytes() const;
  /// Bytes of what gather `stage` makes, in the measure of `CollectiveCounters`.
  int64_t payload(size_t stage) const;

  /// Parameter `index` in the unsharded storage; no leaf, so that reads and writes of it are unseen.
  at::Tensor whole_parameter(size_t index) const;

 private:
  class Extending;
  bool is_sharded() const { return !is_open(); }
  /// An error in a function of a gather extension, which would read, or free, what it is to make.
  void check_not_extending() const;
  void enter(GatherState next);
  at::Tensor unsharded_bytes() const;
  /// `whole_parameter` with row-major strides, as the data lies before `restride_gathered`.
  at::Tensor row_major_parameter(size_t index) const;
  void wait_for_first_stage(Gathering& gathering);
  /// Runs the stages after the first, and copies what they have gathered to where it is read.
  void complete(Gathering& gathering);
  void drop();
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
  KeptPart* part_after_forward();
  bool is_valid(const KeptPart& part) const;
  /// The stage with which a gather begins: the last one whose part is valid, or the first.
  size_t first_stage() const;
  /// Bytes that a rank contributes to the first stage.
  int64_t sent_bytes() const;
  void prepare_extended();
  void copy_out_extended(const at::Tensor& by_rank);
  void copy_out(const at::Tensor& gathered);
  void copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies);
  bool splits_rows() const;
  void split_rows(const at::Tensor& by_rank);

  ParameterGroup& group_;
  bool is_needed_ = true;
  bool is_extending_ = false; ///< a function of an extension runs
  GatherState state_;
  c10::intrusive_ptr<UnshardedStorage> storage_;
  BlockUsers users_; ///< of the storage
  ExtendedGather extended_;
  GatherMessages messages_;
  std::vector<KeptPart> kept_;          ///< one a stage of gathers; the first stage has none
  std::optional<uint64_t> version_ = 0; ///< of the shard
};

} // namespace tessera::internal
