#include <tessera/parallel/pipeline_schedule.h>

#include <c10/util/Exception.h>

#include <algorithm>

#include <tessera/parallel/pipeline/schedule_shapes.h>

namespace tessera {

namespace {

std::vector<PipelineAction> order_of(PipelineScheduleKind kind, const PipelineShape& shape, int64_t rank) {
  switch (kind) {
    case PipelineScheduleKind::kZeroBubbleV: return internal::pipeline::zero_bubble_v_order(shape, rank);
    case PipelineScheduleKind::kDualPipeV: return internal::pipeline::dual_pipe_v_order(shape, rank);
    default: return internal::pipeline::looped_order(kind, shape, rank);
  }
}

} // namespace

bool PipelineSchedule::splits_backward() const {
  return std::any_of(actions.begin(), actions.end(), [](const auto& of_rank) {
    return std::any_of(of_rank.begin(), of_rank.end(),
                       [](const auto& action) { return action.work == PipelineWork::kInputGradients; });
  });
}

const std::vector<PipelineScheduleName>& pipeline_schedule_names() {
  static const std::vector<PipelineScheduleName> names{
      {PipelineScheduleKind::kGPipe, "gpipe"},
      {PipelineScheduleKind::k1F1B, "1f1b"},
      {PipelineScheduleKind::kInterleaved1F1B, "interleaved-1f1b"},
      {PipelineScheduleKind::kLoopedBFS, "looped-bfs"},
      {PipelineScheduleKind::kZeroBubbleH1, "zb-h1"},
      {PipelineScheduleKind::kInterleavedZeroBubble, "interleaved-zb"},
      {PipelineScheduleKind::kZeroBubbleV, "zb-v"},
      {PipelineScheduleKind::kDualPipeV, "dualpipe-v"},
  };
  return names;
}

PipelineScheduleKind pipeline_schedule_kind(std::string_view name) {
  std::string known;
  for (const auto& each : pipeline_schedule_names()) {
    if (each.name == name) return each.kind;
    known += c10::str(known.empty() ? "" : ", ", each.name);
  }
  TORCH_CHECK(false, "no schedule of a pipeline is called ", name, "; there are ", known);
}

PipelineSchedule pipeline_schedule(PipelineScheduleKind kind, const PipelineShape& shape) {
  const auto checked = internal::pipeline::checked_shape(kind, shape);
  const bool is_v = kind == PipelineScheduleKind::kZeroBubbleV || kind == PipelineScheduleKind::kDualPipeV;
  PipelineSchedule schedule;
  const auto& names = pipeline_schedule_names();
  schedule.name = std::find_if(names.begin(), names.end(), [=](const auto& each) { return each.kind == kind; })->name;
  schedule.micro_batches = checked.micro_batches;
  schedule.rank_of_stage =
      is_v ? internal::pipeline::v_ranks(checked.ranks) : internal::pipeline::looped_ranks(checked.ranks, checked.chunks);
  for (int64_t rank = 0; rank < checked.ranks; ++rank) schedule.actions.push_back(order_of(kind, checked, rank));
  return schedule;
}

PipelineSchedule with_residency(PipelineSchedule schedule, int64_t active) {
  TORCH_CHECK(active >= 1, "a rank of a pipeline computes with at least 1 gathered stage, and was given ", active);
  for (auto& actions : schedule.actions) actions = internal::pipeline::with_gathers(actions, active);
  return schedule;
}

} // namespace tessera
