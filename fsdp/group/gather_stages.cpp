// The stages of a group's gather: what a rank sends and receives in each, and whom it tells where it cannot.

#include <ATen/ops/empty.h>

#include <string>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/base/meta_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/collectives/continued_work.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/group/step_recorder.h>

namespace tessera::internal {

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

} // namespace tessera::internal
