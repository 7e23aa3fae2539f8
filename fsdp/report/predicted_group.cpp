#include <tessera/fsdp/report/predicted_group.h>

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include <tessera/fsdp/buffers/bytes_of.h>
#include <tessera/fsdp/gradients/gradient_layout.h>

namespace tessera::internal {

namespace {

int64_t chunk_bytes_of(const ParameterGroup& group) {
  if (!trains_any(group)) return 0;
  const auto layout = plan_reduce(group.layout(), trained_of(group));
  return layout.chunk_numel * static_cast<int64_t>(c10::elementSize(reduce_dtype_of(group, trained_of(group))));
}

/// Bytes that a rank sends in a gather. What an extension sends is unknown before the first gather: the rank's part in the dtype
/// that forward reads stands for it.
int64_t sent_bytes_of(const ParameterGroup& group) {
  int64_t bytes = group.layout().shard_bytes;
  for (size_t i = 0; i < group.parameters().size(); ++i) {
    if (!group.gather().extended().contains(i)) continue;
    const auto& parameter = group.parameters()[i];
    const auto part = at::ceil_div(parameter.unsharded_numel(), int64_t{group.roles().shard_ranks()});
    bytes += at::round_up(part * static_cast<int64_t>(c10::elementSize(parameter.forward.dtype)), kParameterAlignment);
  }
  return bytes;
}

/// Bytes of the parts from which gathers start, that the stages before the innermost one have gathered.
int64_t kept_until_written(const ParameterGroup& group) {
  const auto& stages = group.stages();
  int64_t part = sent_bytes_of(group), kept = 0;
  for (size_t stage = 0; stage < stages.innermost(); ++stage) kept += part *= stages.gathers[stage].ranks();
  return kept;
}

/// Bytes that an extension of the group's reductions keeps.
int64_t kept_by_reductions(const ParameterGroup& group) {
  if (!trains_any(group)) return 0;
  const auto takes_part = trained_of(group);
  const auto layout = plan_reduce(group.layout(), takes_part);
  const auto extension = make_reduction_extension(group, takes_part, layout, reduce_dtype_of(group, takes_part));
  return extension ? extension->state_bytes() : 0;
}

/// The reduced gradients have another dtype than the parameters, and are copied.
bool casts_gradients(const ParameterGroup& group) {
  return group.parameters()[0].spec->dtype() != reduce_dtype_of(group, trained_of(group));
}

/// The reduce buffer is a block of the model's; otherwise the gradients stay in it.
bool has_block(const ParameterGroup& group) { return group.stages().reduce_scatter() != nullptr; }

/// The memory of a group's gradients is freed with the last one of them.
bool steps_in_backward(const GroupGradients& gradients) {
  const auto& parameters = gradients.group().parameters();
  return std::all_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
    const auto frees = [&](const auto& taker) { return taker->frees(parameter.tensor._unsafe_get_target()); };
    const auto& takers = gradients.settings.takers;
    return !is_trained(parameter) || std::any_of(takers.begin(), takers.end(), frees);
  });
}

/// It is the one of the last backward. Before any, it is what is registered first, as the weight of a linear layer.
size_t last_to_land(const GroupGradients& gradients) {
  const auto& parameters = gradients.group().parameters();
  const auto first = std::find_if(parameters.begin(), parameters.end(), is_trained);
  return gradients.landed().last().value_or(static_cast<size_t>(first - parameters.begin()));
}

GradientSizes sizes_of(const ParameterGroup& group, size_t last) {
  GradientSizes sizes;
  for (size_t index = 0; index < group.parameters().size(); ++index) {
    const auto& parameter = group.parameters()[index];
    if (!is_trained(parameter)) continue;
    const auto gradient = parameter.unsharded_numel() * static_cast<int64_t>(c10::elementSize(parameter.forward.dtype));
    if (index == last) sizes.last = gradient;
    sizes.all += gradient;
    sizes.largest = std::max(sizes.largest, gradient);
    sizes.largest_local = std::max(sizes.largest_local, bytes_of(parameter.local));
  }
  return sizes;
}

} // namespace

int64_t reduce_bytes_of(const ParameterGroup& group) {
  return !group.stages().reductions.empty() ? chunk_bytes_of(group) * group.roles().shard_ranks() : 0;
}

int64_t trained_bytes_of(const ParameterGroup& group) {
  int64_t bytes = 0;
  for (const auto& parameter : group.parameters()) bytes += is_trained(parameter) ? bytes_of(parameter.local) : 0;
  return bytes;
}

int64_t kept_bytes_of(const ParameterGroup& group) { return kept_until_written(group) + kept_by_reductions(group); }

PredictedGroup predicted_group(const GroupGradients& gradients) {
  const auto group = gradients.group().shared_from_this();
  const auto& parameters = group->parameters();
  const bool is_in_files = group->memory() && group->options().offload.memory == OffloadPolicy::Memory::kFiles;
  PredictedGroup added{.group = group, .settings = &gradients.settings};
  added.trains = trains_any(*group);
  added.leaves_out_any = !std::all_of(parameters.begin(), parameters.end(), is_trained);
  added.steps = added.trains && steps_in_backward(gradients);
  added.gradients = sizes_of(*group, last_to_land(gradients));
  added.reduction = PredictedReduction(*group, trained_bytes_of(*group), is_in_files);
  return added;
}

void PredictedGroup::join(const PredictedGroup& beside, bool lands_last) {
  trains = trains || beside.trains;
  leaves_out_any = leaves_out_any || beside.leaves_out_any;
  if (lands_last) gradients.last = beside.gradients.last;
  gradients.all += beside.gradients.all;
  gradients.largest = std::max(gradients.largest, beside.gradients.largest);
}

void PredictedGather::start(const ParameterGroup& group, MemoryAccount& memory) {
  if (!group.needs_gather() || is_open(residence_)) return;
  const auto& layout = group.layout();
  residence_ = Residence::kGathering;
  is_stale_ = false;
  unsharded_ = memory.blocks.take(layout.unsharded_bytes);
  memory.now.unsharded += unsharded_;
  if (!layout.gathers_in_place && kept_part_ == 0) {
    output_ = memory.blocks.take(sent_bytes_of(group) * group.roles().shard_ranks());
    memory.now.unsharded += output_;
  }
  if (!group.gather().messages().is_empty() && kept_part_ == 0) {
    messages_ = memory.blocks.take(group.gather().payload(group.stages().innermost()));
    memory.now.unsharded += messages_;
  }
}

void PredictedGather::finish(MemoryAccount& memory) {
  if (residence_ != Residence::kGathering) return;
  residence_ = Residence::kUnsharded;
  memory.now.unsharded -= output_;
  if (output_ > 0) memory.blocks.give_back(std::exchange(output_, 0));
  memory.now.unsharded -= messages_;
  if (messages_ > 0) memory.blocks.give_back(std::exchange(messages_, 0));
}

void PredictedGather::release(MemoryAccount& memory) {
  finish(memory);
  if (residence_ != Residence::kUnsharded) return;
  residence_ = Residence::kSharded;
  memory.now.unsharded -= unsharded_;
  memory.blocks.give_back(std::exchange(unsharded_, 0));
}

void PredictedGather::free(MemoryAccount& memory) {
  memory.now.parameters -= std::exchange(kept_part_, 0);
  release(memory);
}

/// The part that is kept is a copy, made before the rest is freed.
void PredictedGather::free_after_forward(const ParameterGroup& group, MemoryAccount& memory) {
  const auto& stages = group.stages();
  if (stages.has_after_forward() && residence_ == Residence::kUnsharded && !is_stale_ && kept_part_ == 0) {
    kept_part_ = group.layout().unsharded_bytes / stages.gathers.back().ranks();
    memory.now.parameters += kept_part_;
    memory.note();
  }
  release(memory);
}

PredictedReduction::PredictedReduction(const ParameterGroup& group, int64_t local_bytes, bool is_in_files)
    : buffer_bytes_(reduce_bytes_of(group)) {
  const bool reduces = !group.stages().reductions.empty();
  chunk_bytes_ = reduces ? chunk_bytes_of(group) : 0;
  delivered_bytes_ = reduces && !casts_gradients(group) ? chunk_bytes_ : local_bytes;
  if (is_in_files) delivered_bytes_ = 0;
}

void PredictedReduction::allocate(const ParameterGroup& group, MemoryAccount& memory) {
  if (buffer_ > 0 || buffer_bytes_ == 0) return;
  buffer_ = has_block(group) ? memory.blocks.take(buffer_bytes_) : buffer_bytes_;
  memory.now.reduce_buffers += buffer_;
}

bool PredictedReduction::start(const ParameterGroup& group, MemoryAccount& memory) {
  if (buffer_bytes_ == 0) return false;
  running_ = Running();
  if (const auto& inside = group.stages().reduce_scatter()) write(buffer_bytes_ / inside->size(), memory);
  return true;
}

void PredictedReduction::write(int64_t bytes, MemoryAccount& memory) {
  running_->written += bytes;
  memory.now.reduce_buffers += bytes;
  memory.note();
}

void PredictedReduction::advance(const ParameterGroup& group, MemoryAccount& memory) {
  if (!running_ || std::exchange(running_->has_advanced, true)) return;
  const auto& stages = group.stages();
  if (stages.reduce_scatter()) {
    memory.now.reduce_buffers -= buffer_;
    memory.blocks.give_back(std::exchange(buffer_, 0));
  }
  if (stages.may_wait() && stages.reductions.back().kind == Stage::Kind::kReduceScatter) write(chunk_bytes_, memory);
  memory.note();
}

void PredictedReduction::finish(const ParameterGroup& group, MemoryAccount& memory) {
  advance(group, memory);
  memory.now.reduce_buffers -= std::exchange(buffer_, 0) + running_->written;
  running_.reset();
}

} // namespace tessera::internal
