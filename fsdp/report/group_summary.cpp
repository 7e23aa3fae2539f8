#include <tessera/fsdp/summary.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include <tessera/base/text_table.h>
#include <tessera/fsdp/buffers/bytes_of.h>
#include <tessera/fsdp/gradients/gradient_layout.h>
#include <tessera/fsdp/gradients/group_gradients.h>
#include <tessera/fsdp/group/parallel_parameter.h>
#include <tessera/fsdp/group/parameter_group.h>
#include <tessera/fsdp/memory_prediction.h>

namespace tessera::internal {

namespace {

/// A group with a parameter that the program placed, whose gather it extends, or whose parts have no ranges with a name, is laid
/// out per parameter whatever it asked for.
bool is_ragged(const ParameterGroup& group) {
  const auto& parameters = group.parameters();
  const auto is_placed = [](const ShardedParameter& each) {
    const auto& chosen = each.origin.chosen;
    const auto& parallel = each.forward.parallel;
    return (chosen && !is_replicate(*chosen)) || (parallel && !may_be_ragged(*parallel));
  };
  return group.options().layout == BufferLayout::kRagged && group.gather().extended().is_empty() &&
         std::none_of(parameters.begin(), parameters.end(), is_placed);
}

/// The bytes that the collectives of one reduction send, in the measure of `CollectiveCounters`.
int64_t reduction_payload_of(const ParameterGroup& group) {
  const auto& reductions = group.stages().reductions;
  if (reductions.empty() || !trains_any(group)) return 0;
  const auto takes_part = trained_of(group);
  const auto layout = plan_reduce(group.layout(), takes_part);
  const auto dtype = reduce_dtype_of(group, takes_part);
  const auto extension = make_reduction_extension(group, takes_part, layout, dtype);
  int64_t bytes = 0;
  for (const auto& stage : reduction_stages_of(group.roles(), group.stages())) {
    const int64_t plain = stage.chunks * layout.chunk_numel * static_cast<int64_t>(c10::elementSize(dtype));
    bytes += extension ? extension->payload(stage) : plain;
  }
  return bytes;
}

/// The payload of the stage that makes the whole.
int64_t gather_bytes_of(const ParameterGroup& group) {
  if (!group.stages().communicates()) return 0;
  if (!group.gather().messages().is_empty()) return group.gather().payload(group.stages().innermost());
  return group.roles().shard_ranks() * group.layout().shard_bytes;
}

} // namespace

GroupSummary summary_of(const ParameterGroup& group) {
  GroupSummary result{.name = group.label(),
                      .mesh = fmt::format("{} ranks", fmt::join(group.roles().mesh().shape(), " x ")),
                      .strategy = std::string(row_of(group.roles().strategy()).name),
                      .layout = is_ragged(group) ? "ragged" : "per-parameter",
                      .parameters = static_cast<int64_t>(group.parameters().size()),
                      .unsharded_bytes = group.gathered_bytes(),
                      .gather_bytes = gather_bytes_of(group),
                      .reduce_bytes = reduce_bytes_of(group),
                      .reduce_payload_bytes = reduction_payload_of(group),
                      .padding_bytes = group.gathered_bytes(),
                      .reshards_after_forward = group.owner->reshards_after_forward()};
  for (const auto& parameter : group.parameters()) {
    result.shard_bytes += bytes_of(parameter.local);
    if (group.needs_gather())
      result.padding_bytes -= parameter.unsharded_numel() * static_cast<int64_t>(c10::elementSize(parameter.forward.dtype));
  }
  return result;
}

std::string group_table(const std::vector<GroupSummary>& groups) {
  std::vector<TextRow> rows{{"group", "mesh", "strategy", "layout", "count", "here", "unsharded", "to gather", "to reduce",
                             "padding", "after forward"}};
  for (const auto& group : groups) {
    rows.push_back({group.name, group.mesh, group.strategy, group.layout, std::to_string(group.parameters),
                    std::to_string(group.shard_bytes), std::to_string(group.unsharded_bytes), std::to_string(group.gather_bytes),
                    std::to_string(group.reduce_bytes), std::to_string(group.padding_bytes),
                    group.reshards_after_forward ? "freed" : "kept"});
  }
  return text_table(rows, {"count", "here", "unsharded", "to gather", "to reduce", "padding"});
}

} // namespace tessera::internal
