#include <tessera/parallel/pipeline/schedule_shapes.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::internal::pipeline {

namespace {

bool is_v(PipelineScheduleKind kind) {
  return kind == PipelineScheduleKind::kZeroBubbleV || kind == PipelineScheduleKind::kDualPipeV;
}

bool is_interleaved(PipelineScheduleKind kind) {
  return kind == PipelineScheduleKind::kInterleaved1F1B || kind == PipelineScheduleKind::kInterleavedZeroBubble;
}

bool has_one_stage_a_rank(PipelineScheduleKind kind) {
  return kind == PipelineScheduleKind::kGPipe || kind == PipelineScheduleKind::k1F1B ||
         kind == PipelineScheduleKind::kZeroBubbleH1;
}

std::string_view name_of(PipelineScheduleKind kind) {
  const auto& names = pipeline_schedule_names();
  return std::find_if(names.begin(), names.end(), [=](const auto& each) { return each.kind == kind; })->name;
}

/// PyTorch's choice, or 0 where it has none.
int64_t own_group(int64_t micro_batches, int64_t ranks) {
  const auto rounds = std::max<int64_t>(1, micro_batches / ranks);
  return micro_batches % rounds == 0 ? micro_batches / rounds : 0;
}

/// What is left over for the last group must be none, or fill the pipeline: otherwise a rank waits for what comes after its own
/// next forward.
bool may_group(int64_t micro_batches, int64_t ranks, int64_t group) {
  const auto left = micro_batches % group;
  return group >= ranks && (micro_batches <= group || left == 0 || left >= ranks);
}

bool is_possible(PipelineScheduleKind kind, const PipelineShape& shape, int64_t micro_batches) {
  if (micro_batches < 1) return false;
  if (kind == PipelineScheduleKind::kDualPipeV) return micro_batches >= 2 * shape.ranks;
  if (!is_interleaved(kind)) return true;
  return shape.group > 0 ? may_group(micro_batches, shape.ranks, shape.group) : own_group(micro_batches, shape.ranks) > 0;
}

/// "8 or 10"
std::string nearest_possible(PipelineScheduleKind kind, const PipelineShape& shape) {
  auto below = shape.micro_batches, above = std::max<int64_t>(shape.micro_batches, 0);
  while (below > 0 && !is_possible(kind, shape, below)) --below;
  while (!is_possible(kind, shape, above)) ++above;
  return below > 0 ? c10::str(below, " or ", above) : c10::str(above);
}

void check_chunks(PipelineScheduleKind kind, int64_t chunks) {
  const auto wanted = has_one_stage_a_rank(kind) ? 1 : 2;
  const bool is_fixed = has_one_stage_a_rank(kind) || is_v(kind);
  TORCH_CHECK(chunks >= 1 && (!is_fixed || chunks == wanted), "the schedule ", name_of(kind), " has ",
              is_fixed ? c10::str(wanted) : "one or more", " stages a rank (chunks), and was given ", chunks);
}

/// A schedule has all of its actions in memory, about 100 bytes each with what is computed of it.
void check_size(const PipelineShape& shape) {
  constexpr int64_t kMostForwards = 1 << 25;
  const auto left = kMostForwards / shape.ranks / shape.chunks;
  TORCH_CHECK(shape.micro_batches <= left, "a pipeline of ", shape.ranks, " ranks with ", shape.chunks, " stages each and ",
              shape.micro_batches, " micro-batches has more than ", kMostForwards, " forwards, for which no schedule is made");
}

} // namespace

std::vector<int64_t> looped_ranks(int64_t ranks, int64_t chunks) {
  std::vector<int64_t> rank_of_stage;
  for (int64_t stage = 0; stage < ranks * chunks; ++stage) rank_of_stage.push_back(stage % ranks);
  return rank_of_stage;
}

std::vector<int64_t> v_ranks(int64_t ranks) {
  std::vector<int64_t> rank_of_stage;
  for (int64_t stage = 0; stage < 2 * ranks; ++stage) rank_of_stage.push_back(std::min(stage, 2 * ranks - 1 - stage));
  return rank_of_stage;
}

PipelineShape checked_shape(PipelineScheduleKind kind, PipelineShape shape) {
  TORCH_CHECK(shape.ranks >= 1, "a pipeline of ", shape.ranks, " ranks");
  check_chunks(kind, shape.chunks);
  check_size(shape);
  TORCH_CHECK(shape.group >= 0, "a pipeline's group of ", shape.group, " micro-batches");
  TORCH_CHECK(!is_interleaved(kind) || shape.group == 0 || shape.group >= shape.ranks, "a group of ", shape.group,
              " micro-batches is fewer than the ", shape.ranks, " ranks of the pipeline: it would wait for itself");
  TORCH_CHECK(is_possible(kind, shape, shape.micro_batches), "the schedule ", name_of(kind), " on ", shape.ranks,
              " ranks cannot take ", shape.micro_batches,
              " micro-batches; the nearest that it can: ", nearest_possible(kind, shape));
  if (shape.group == 0) shape.group = is_interleaved(kind) ? own_group(shape.micro_batches, shape.ranks) : shape.micro_batches;
  return shape;
}

} // namespace tessera::internal::pipeline
