// The unsharded parameters of a group, from the start of their gather until they are freed.

#include <memory>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/base/tensor_over.h>
#include <tessera/fsdp/buffers/own_work.h>
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
