// The gathers of a group: from the shards to the unsharded parameters.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/base/meta_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/fsdp/buffers/copy_elements.h>
#include <tessera/fsdp/buffers/copy_list.h>
#include <tessera/fsdp/buffers/flat_views.h>
#include <tessera/fsdp/buffers/own_work.h>
#include <tessera/fsdp/buffers/row_split.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/group/profiler_range.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

GroupGather::~GroupGather() {
  try {
    users_.join(); // the shard, which a gather reads that nobody may have waited for, is freed after this
    users_.end();
    for (auto& part : kept_) part.users.end();
  } catch (...) { // of a device that has failed
  }
  if (storage_) storage_->forget_group();
}

void GroupGather::make_storage(const at::Tensor& shard) {
  storage_ = c10::make_intrusive<UnshardedStorage>(group_.roles().mesh().device(), &group_);
  if (is_needed_) return;
  auto owner = std::make_unique<c10::Storage>(shard.storage()); // the leaves alias the shard
  void* data = owner->mutable_data();
  storage_->fill({data, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); }, shard.device()},
                 group_.layout().unsharded_bytes);
  enter(Unsharded());
}

KeptPart* GroupGather::part_after_forward() { return group_.stages().has_after_forward() ? &kept_.back() : nullptr; }

bool GroupGather::is_valid(const KeptPart& part) const { return part.value.defined() && part.is_of(group_.shard_version()); }

int64_t GroupGather::sent_bytes() const { return group_.layout().shard_bytes + extended_.bytes(); }

const at::Tensor& GroupGather::fetched_shard() { return group_.shard_.fetched(*group_.resources_); }

at::Tensor GroupGather::fetched_local(size_t index) const {
  return group_.shard_.fetched_local(group_.parameters()[index].local);
}

/// What `allocate` returns: memory for a gather.
template <typename Allocate>
auto GroupGather::allocate_or_tell(int64_t bytes, const Allocate& allocate) {
  const MemoryUseScope use(MemoryUse::kUnsharded);
  try {
    return allocate();
  } catch (const std::exception& error) {
    tell_failure(c10::str("no memory for the ", bytes, " bytes of ", group_.label(), ": ", error_text(error)));
    throw;
  }
}

c10::DataPtr GroupGather::allocate_to_gather(int64_t bytes) {
  return allocate_or_tell(bytes,
                          [&] { return group_.cache().allocate(bytes, group_.stages().inner_gather().communicator.get()); });
}

/// What fails on this rank ends the gather on the others, which would wait for it.
void GroupGather::try_fetch() {
  try {
    fetched_shard();
  } catch (const std::exception& error) {
    tell_failure(error_text(error));
    throw;
  }
}

namespace {

void give_up(const CommunicatorPtr& communicator, const std::string& cause) {
  if (!communicator) return;
  try {
    communicator->give_up(cause);
  } catch (const std::exception&) { // as on every rank
  }
}

} // namespace

/// In place of the gather, which the other ranks call: where they compare what they call, they learn the cause. Those of the
/// first stage do now: the others wait for this rank when they read the parameters, perhaps not yet.
void GroupGather::tell_failure(const std::string& failure) {
  // Ranks tell the first characters of what they call: the cause stands at the end of an error.
  const auto cause = failure.rfind(": ");
  const auto told = cause == std::string::npos ? failure : failure.substr(cause + 2) + ": " + failure.substr(0, cause);
  const size_t stage = first_stage();
  if (auto* const sharded = std::get_if<Sharded>(&state_)) sharded->has_told_first = group_.stages().follows(stage + 1);
  give_up(group_.stages().gathers[stage].communicator, told);
}

/// Gives up the stages after `stage`, which the other ranks call.
void GroupGather::give_up_after(size_t stage, const std::string& cause) const {
  while (group_.stages().follows(++stage)) give_up(group_.stages().gathers[stage].communicator, cause);
}

size_t GroupGather::first_stage() const {
  size_t stage = kept_.size() - 1;
  while (stage > 0 && !is_valid(kept_[stage])) --stage;
  return stage;
}

namespace {

void check_has_memory(const ParameterGroup& group) {
  TORCH_CHECK(group.gather().has_memory(), "the parameters of ", group.label(), " (", group.full_name(0),
              ", …) are on the meta device: call tessera::materialize before they are gathered");
}

} // namespace

void GroupGather::start() {
  check_not_extending();
  if (is_open()) return;
  check_has_memory(group_);
  const ProfilerRange range("all_gather", group_);
  const OwnWork own_work{};
  // On a device the block is one of the current stream, although another fills it: the gather comes after what this one holds.
  const bool had_told_first = std::get<Sharded>(state_).has_told_first;
  const auto& stream = group_.streams().gather;
  Gathering gathering;
  try {
    storage_->fill(allocate_to_gather(group_.layout().unsharded_bytes), group_.layout().unsharded_bytes);
    version_ = group_.shard_version();
    gathering.work = stream.run([&] {
      auto work = start_first_stage(gathering);
      gathering.completes_later = !stream.exists() || work.blocks_host();
      if (gathering.completes_later) return work;
      work.wait();
      complete(gathering);
      return Work();
    });
  } catch (...) {
    storage_->release();
    if (had_told_first) give_up_after(gathering.stage, error_text(std::current_exception()));
    throw;
  }
  users_.begin(storage_->device());
  users_.wait_for(gathering.work);
  enter(std::move(gathering));
}

Work GroupGather::start_first_stage(Gathering& gathering) {
  const size_t stage = gathering.stage = first_stage();
  auto& kept = kept_[stage];
  if (!group_.stages().follows(stage)) { // it gathers unsharded parameters as they lie
    kept.users.join();
    return gather_stage(stage, unsharded_bytes(), kept.value);
  }
  if (stage == 0) try_fetch();
  if (stage == 0 && !extended_.is_empty()) prepare_extended();
  if (group_.layout().replicated_bytes > 0) fill_replicated(unsharded_bytes());
  gathering.output = allocate_output();
  const auto& output = output_of(stage, gathering);
  return gather_stage(stage, output, stage == 0 ? own_part_to_send(output) : kept.value);
}

/// On one rank `input` is all there is.
Work GroupGather::gather_stage(size_t stage, const at::Tensor& output, const at::Tensor& input) {
  const auto& ranks = group_.stages().gathers[stage].communicator;
  if (!ranks) {
    if (!input.is_alias_of(output)) output.copy_(input);
    return Work();
  }
  if (!messages_.is_empty() && group_.stages().follows(stage)) return gather_messages(stage, output, input);
  note_collective(group_, CollectiveKind::kAllGather, output);
  auto work = ranks->all_gather_into(output, input, group_.label());
  note_work(group_, work);
  return work;
}

/// The shard numbers of an inner group are next to each other: what one stage gathers is one peer's in the next.
MessageRanks GroupGather::message_ranks(size_t stage) const {
  MessageRanks ranks{.peers = group_.stages().gathers[stage].ranks(), .own = group_.stages().gathers[stage].rank()};
  for (size_t before = 0; before < stage; ++before) ranks.each *= group_.stages().gathers[before].ranks();
  const int64_t all = ranks.each * ranks.peers;
  ranks.first = group_.roles().shard_rank() / all * all;
  return ranks;
}

int64_t GroupGather::payload(size_t stage) const {
  const auto ranks = message_ranks(stage);
  if (messages_.is_empty() || ranks.peers == 1) return ranks.each * ranks.peers * sent_bytes();
  return ranks.peers * messages_.largest(group_.layout(), sent_bytes(), ranks);
}

/// Gathers the messages instead of the bytes. Nothing that they lack is taken from this rank's own part: all ranks read the same.
Work GroupGather::gather_messages(size_t stage, const at::Tensor& output, const at::Tensor& input) {
  const auto ranks = message_ranks(stage);
  const auto& communicator = group_.stages().gathers[stage].communicator;
  const int64_t bytes = messages_.largest(group_.layout(), sent_bytes(), ranks), all = ranks.peers * bytes;
  const c10::Storage storage(c10::Storage::use_byte_size_t(), all,
                             allocate_or_tell(all, [&] { return group_.cache().allocate(all, communicator.get()); }));
  const auto received = tensor_over(storage, 0, {all}, at::kByte),
             sent = tensor_over(storage, ranks.own * bytes, {bytes}, at::kByte);
  messages_.encode(group_.layout(), sent_bytes(), ranks, input, sent);
  note_collective(group_, CollectiveKind::kAllGather, all);
  auto work = communicator->all_gather_into(received, sent, group_.label());
  note_work(group_, work);
  return then(std::move(work),
              [this, ranks, received, output] { messages_.decode(group_.layout(), sent_bytes(), ranks, received, output); });
}

/// Says that a function of an extension runs.
class GroupGather::Extending {
 public:
  explicit Extending(GroupGather& gather) : gather_(gather), program_(gather.group_.mutex(), "a GatherExtension") {
    gather_.is_extending_ = true;
  }
  ~Extending() { gather_.is_extending_ = false; }
  Extending(const Extending&) = delete;
  Extending& operator=(const Extending&) = delete;

 private:
  GroupGather& gather_;
  const ProgramCall program_;
};

void GroupGather::check_not_extending() const {
  TORCH_CHECK(!is_extending_, "a GatherExtension of ", group_.label(),
              " reads or frees the parameters of this group while it is gathered: it has the shard, or what was gathered, alone");
}

void GroupGather::prepare_extended() {
  const auto communicator =
      group_.stages().follows(1) ? group_.roles().shard_communicator() : group_.stages().gathers[0].communicator;
  const Extending extending(*this);
  extended_.prepare(
      group_.roles().mesh(), communicator.get(), group_.label(), [&](size_t index) { return fetched_local(index); },
      [&](size_t index) { return group_.full_name(index); });
}

void GroupGather::copy_out_extended(const at::Tensor& by_rank) {
  const Extending extending(*this);
  extended_.read(
      by_rank, [&](size_t index) { return whole_parameter(index); }, [&](size_t index) { return group_.full_name(index); });
}

/// Allocates what the shards of all ranks are gathered to.
at::Tensor GroupGather::allocate_output() {
  const int64_t bytes = sent_bytes() * group_.roles().shard_ranks();
  if (group_.layout().gathers_in_place) return unsharded_bytes().narrow(0, 0, bytes);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_to_gather(bytes));
  return tensor_over(storage, 0, {bytes}, at::kByte);
}

/// Stage `stage` gathers to the part that the next one starts from, or to the output of all.
const at::Tensor& GroupGather::output_of(size_t stage, const Gathering& gathering) {
  if (!group_.stages().follows(stage + 1)) return gathering.output;
  auto& part = kept_[stage + 1].value;
  if (part.defined()) return part;
  int64_t bytes = gathering.output.numel();
  for (size_t inner = stage + 1; group_.stages().follows(inner); ++inner) bytes /= group_.stages().gathers[inner].ranks();
  return part = allocate_or_tell(bytes, [&] { return at::empty({bytes}, gathering.output.options()); });
}

/// What this rank sends in the first stage: its shard, or what is made of it in its place in `output`.
at::Tensor GroupGather::own_part_to_send(const at::Tensor& output) {
  if (!group_.shard_.plan().casts) return fetched_shard().narrow(0, 0, group_.layout().shard_bytes);
  auto part = output.narrow(0, group_.stages().gathers[0].rank() * sent_bytes(), sent_bytes());
  cast_into(part);
  if (!extended_.is_empty()) extended_.write(part.narrow(0, group_.layout().shard_bytes, extended_.bytes()));
  return part;
}

void GroupGather::finish() {
  check_not_extending();
  auto* const gathering = std::get_if<Gathering>(&state_);
  if (gathering && gathering->completes_later) {
    const ProfilerRange range("all_gather_wait", group_);
    const ExposedTime exposed(group_, &GroupReport::gather_wait_seconds);
    const OwnWork own_work{};
    group_.streams().gather.run([&] { // before any user waits: each waits for what the stream holds then
      wait_for_first_stage(*gathering);
      complete(*gathering);
      return Work();
    });
  }
  users_.join();
  if (gathering) enter(Unsharded());
}

void GroupGather::wait_for_first_stage(Gathering& gathering) {
  try {
    gathering.work.wait();
  } catch (const std::exception& error) {
    give_up_after(gathering.stage, error_text(error));
    throw;
  }
}

void GroupGather::complete(Gathering& gathering) {
  const bool gathers_unsharded_parts = !group_.stages().follows(gathering.stage); // with their strides
  try {
    for (size_t next = gathering.stage + 1; group_.stages().follows(next); ++next) {
      kept_[next].version = version_;
      gather_stage(next, output_of(next, gathering), kept_[next].value).wait();
      gathering.stage = next;
    }
    const auto gathered = std::exchange(gathering.output, at::Tensor());
    if (!group_.layout().gathers_in_place && !gathers_unsharded_parts) copy_out(gathered);
  } catch (...) { // of a broken communicator, or a gather extension
    drop();
    throw;
  }
  group_.shard_.release_fetched();
  if (!gathers_unsharded_parts) restride_gathered();
}

/// As before it began: a later read must not find what was not filled.
void GroupGather::drop() {
  try {
    users_.end();
  } catch (...) { // which its reader learns
  }
  storage_->release();
  group_.shard_.release_fetched();
  state_ = Sharded();
}

void GroupGather::restride_gathered() {
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& parameter = group_.parameters()[i];
    if (parameter.strides.are_made_by_gathers() && !extended_.contains(i))
      whole_parameter(i).copy_(row_major_parameter(i).clone());
  }
}

void GroupGather::fill_replicated(const at::Tensor& unsharded) {
  CopyList copies;
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& layout = group_.layout().parameters[i];
    if (!layout.is_replicated()) continue;
    copies.copy(flat_view(unsharded, layout.unsharded_offset, 1, group_.parameters()[i].leaf.scalar_type()),
                fetched_local(i).view({-1}));
  }
  copies.run();
}

void GroupGather::cast_into(const at::Tensor& destination) {
  if (group_.shard_.plan().casts_whole) {
    const auto& any = group_.parameters()[0];
    const auto numel = group_.layout().shard_bytes / static_cast<int64_t>(c10::elementSize(any.forward.dtype));
    flat_view(destination, 0, numel, any.forward.dtype).copy_(flat_view(fetched_shard(), 0, numel, any.spec->dtype()));
    return;
  }
  CopyList copies;
  const auto rank = static_cast<size_t>(group_.roles().shard_rank());
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto piece = group_.layout().parameters[i].pieces[rank];
    if (piece.numel == 0 || group_.layout().parameters[i].is_replicated() || extended_.contains(i)) continue;
    copies.copy(flat_view(destination, piece.shard_offset, piece.numel, group_.parameters()[i].leaf.scalar_type()),
                in_memory_order(fetched_local(i)));
  }
  copies.run();
}

void GroupGather::copy_out_pieces(size_t index, const at::Tensor& by_rank, CopyList& copies) {
  const auto& layout = group_.layout().parameters[index];
  const auto whole = row_major_parameter(index);
  const auto item = static_cast<int64_t>(whole.element_size());
  for (const auto& run : layout.pieces.runs()) {
    const auto& range = run.range;
    if (range.numel == 0) continue;
    if (layout.split_dim == 0 && run.ranks > kFewRanks) {
      const auto sent = by_rank.narrow(0, run.first, run.ranks).narrow(1, range.shard_offset, range.numel * item);
      copies.copy(rows_of(whole, run), sent.view(whole.scalar_type()));
      continue;
    }
    for (int64_t rank = run.first; rank < run.first + run.ranks; ++rank) {
      const auto offset = by_rank.storage_offset() + rank * by_rank.stride(0) + range.shard_offset;
      const auto sent = tensor_over(by_rank.storage(), offset, {range.numel}, whole.scalar_type());
      if (layout.split_dim == 0) {
        copies.copy(flat_range(whole, layout.pieces[static_cast<size_t>(rank)].begin, range.numel), sent);
      } else {
        const auto part = owned_part(whole, layout, static_cast<size_t>(rank));
        copies.copy(part, sent.view(part.sizes()));
      }
    }
  }
}

namespace {

/// Copies a parameter of `bytes` to `to` (bytes) of `output` from the shards of all ranks, [ranks, bytes], in each of which
/// `part` bytes of it begin at `from`. The last part may be shorter, and parts may be missing.
void copy_parts(const at::Tensor& output, int64_t to, int64_t bytes, const at::Tensor& by_rank, int64_t from, int64_t part) {
  if (is_small_plain_copy(output, by_rank, part)) {
    for (int64_t done = 0; done < bytes; done += part, from += by_rank.size(1))
      copy_elements(output, to + done, by_rank, from, std::min(part, bytes - done));
    return;
  }
  const auto whole = output.narrow(0, to, bytes);
  const int64_t full_ranks = bytes / part; // the ranks before the uneven tail
  whole.narrow(0, 0, full_ranks * part).view({full_ranks, part}).copy_(by_rank.narrow(0, 0, full_ranks).narrow(1, from, part));
  if (const int64_t rest = bytes - full_ranks * part; rest > 0)
    whole.narrow(0, full_ranks * part, rest).copy_(by_rank[full_ranks].narrow(0, from, rest));
}

} // namespace

/// Whether pieces are split by rows: on a device with streams, where they are too many for a `CopyList`. Unequal pieces of many
/// ranks are too many to be listed as well.
bool GroupGather::splits_rows() const {
  if (!group_.layout().is_uniform || !group_.streams().gather.exists() || !extended_.is_empty()) return false;
  const auto pieces = count_pieces(group_.layout());
  return pieces.count > kMostPairs && (pieces.are_equal || group_.roles().shard_ranks() <= kFewRanks);
}

/// All ranks' pieces of a parameter at once, where they are equal; otherwise each by itself.
void GroupGather::split_rows(const at::Tensor& by_rank) {
  const bool is_even = count_pieces(group_.layout()).are_equal;
  const int64_t ranks = by_rank.size(0), width = by_rank.size(1), parts = is_even ? 1 : ranks;
  const auto output = unsharded_bytes();
  RowSplit split(by_rank.view({ranks / parts, parts * width}));
  for (int64_t rank = 0; rank < parts; ++rank) {
    for (size_t i = 0; i < group_.parameters().size(); ++i) {
      const auto& parameter = group_.layout().parameters[i];
      const auto piece = parameter.pieces[static_cast<size_t>(rank)];
      if (piece.numel == 0 || parameter.is_replicated()) continue;
      const auto item = static_cast<int64_t>(group_.parameters()[i].leaf.element_size());
      const int64_t place = parameter.unsharded_offset + piece.begin * item;
      split.copy(rank * width + piece.shard_offset,
                 tensor_over(output.storage(), place, {ranks / parts, piece.numel * item}, at::kByte));
    }
  }
  split.run();
}

void GroupGather::copy_out(const at::Tensor& gathered) {
  const at::Tensor output = unsharded_bytes();
  const auto by_rank = gathered.view({group_.roles().shard_ranks(), sent_bytes()});
  if (splits_rows()) return split_rows(by_rank);
  const bool is_uniform =
      group_.layout().is_uniform && !group_.streams().gather.exists(); // there many copies of pieces are one launch
  CopyList pieces;
  if (!extended_.is_empty()) copy_out_extended(by_rank.narrow(1, group_.layout().shard_bytes, extended_.bytes()));
  for (size_t i = 0; i < group_.parameters().size(); ++i) {
    const auto& parameter = group_.layout().parameters[i];
    const auto item = static_cast<int64_t>(group_.parameters()[i].leaf.element_size());
    const int64_t bytes = group_.parameters()[i].leaf.numel() * item;
    if (bytes == 0 || parameter.is_replicated() || extended_.contains(i)) continue;
    if (!is_uniform) {
      copy_out_pieces(i, by_rank, pieces);
      continue;
    }
    const auto piece = parameter.pieces[0];
    copy_parts(output, parameter.unsharded_offset, bytes, by_rank, piece.shard_offset, piece.numel * item);
  }
  pieces.run();
}

void GroupGather::enter(GatherState next) {
  constexpr size_t kStates = std::variant_size_v<GatherState>;
  const bool skips = !is_needed_ && is_sharded() && next.index() == kStates - 1; // the leaves alias the shard
  TORCH_INTERNAL_ASSERT(skips || next.index() == (state_.index() + 1) % kStates, group_.label(), ": from state ", state_.index(),
                        " to ", next.index());
  state_ = std::move(next);
}

at::Tensor GroupGather::unsharded_bytes() const {
  return tensor_over(c10::Storage(storage_), 0, {group_.layout().unsharded_bytes}, at::kByte);
}

at::Tensor GroupGather::whole_parameter(size_t index) const {
  const auto& leaf = group_.parameters()[index].leaf;
  return tensor_over(c10::Storage(storage_), group_.layout().parameters[index].unsharded_offset, leaf.sizes(), leaf.scalar_type(),
                     {}, group_.parameters()[index].strides.whole);
}

at::Tensor GroupGather::row_major_parameter(size_t index) const {
  const auto& leaf = group_.parameters()[index].leaf;
  return tensor_over(c10::Storage(storage_), group_.layout().parameters[index].unsharded_offset, leaf.sizes(),
                     leaf.scalar_type());
}

bool GroupGather::forget_after_forward() {
  auto* const part = part_after_forward();
  if (!part) return false;
  finish(); // perhaps from what was kept
  part->release();
  kept_.pop_back();
  return true;
}

void GroupGather::free() {
  check_not_extending();
  if (auto* const part = part_after_forward()) part->release();
  if (!is_needed_ || is_sharded()) return;
  finish();
  users_.end();
  storage_->release();
  enter(Sharded());
}

void GroupGather::free_after_forward() {
  auto* const part = part_after_forward();
  // Of an earlier one; also where a gather of such parts has failed, which the next read is to find again.
  if (part && is_sharded() && is_valid(*part)) return;
  if (!part || !is_unsharded() || group_.is_stale()) return free();
  const c10::OptionalStreamGuard home(users_.end());
  if (!is_valid(*part)) {
    part->release();
    part->users.begin(storage_->device());
    const OwnWork own_work{};
    const auto& stage = group_.stages().gathers.back();
    const int64_t bytes = group_.layout().unsharded_bytes / stage.ranks();
    part->value = unsharded_bytes().narrow(0, stage.rank() * bytes, bytes).clone();
    part->version = version_;
    part->users.wait_for_home();
  }
  storage_->release();
  enter(Sharded());
}

int64_t GroupGather::kept_bytes() const {
  int64_t bytes = 0;
  for (const auto& part : kept_) bytes += part.bytes();
  return bytes;
}

} // namespace tessera::internal
