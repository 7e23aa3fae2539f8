#include <tessera/parallel/pipeline/dependencies.h>

#include <algorithm>

namespace tessera::internal::pipeline {

std::optional<Part> part_of(const PipelineAction& action) {
  if (action.work == PipelineWork::kForward) return Part{Product::kOutputs, action.stage, action.micro_batch};
  if (gives_input_gradients(action.work)) return Part{Product::kInputGradients, action.stage, action.micro_batch};
  return std::nullopt;
}

std::vector<Part> needs_of(const PipelineAction& action, int64_t stages) {
  const auto of = [&](Product product, int64_t stage) { return Part{product, stage, action.micro_batch}; };
  switch (action.work) {
    case PipelineWork::kForward:
      if (action.stage > 0) return {of(Product::kOutputs, action.stage - 1)};
      return {};
    case PipelineWork::kBackward:
    case PipelineWork::kInputGradients:
      if (action.stage + 1 == stages) return {of(Product::kOutputs, action.stage)};
      return {of(Product::kOutputs, action.stage), of(Product::kInputGradients, action.stage + 1)};
    case PipelineWork::kWeightGradients: return {of(Product::kInputGradients, action.stage)};
    case PipelineWork::kUnshard:
    case PipelineWork::kReshard: return {};
  }
  return {};
}

std::optional<Part> message_of(const PipelineAction& action, const PipelineSchedule& schedule) {
  const auto rank_of = [&](int64_t stage) { return schedule.rank_of_stage[static_cast<size_t>(stage)]; };
  for (const auto& part : needs_of(action, schedule.stages())) {
    if (part.stage != action.stage && rank_of(part.stage) != rank_of(action.stage)) return part;
  }
  return std::nullopt;
}

bool Progress::is_ready(const PipelineAction& action) const {
  const auto needs = needs_of(action, schedule_.stages());
  return std::all_of(needs.begin(), needs.end(), [&](const Part& part) { return made_.contains(part); });
}

/// Overlapping actions begin together, so that none of them may need the other.
std::optional<size_t> Progress::end_of_next(size_t rank) const {
  const auto& actions = schedule_.actions[rank];
  for (auto at = next_[rank]; at < actions.size(); ++at) {
    if (!is_ready(actions[at])) return std::nullopt;
    if (!actions[at].overlaps_next) return at + 1;
  }
  return std::nullopt;
}

void Progress::note(const PipelineAction& action) {
  if (const auto part = part_of(action)) made_.insert(*part);
}

Part Progress::missing(size_t rank) const {
  for (auto at = next_[rank]; at < schedule_.actions[rank].size(); ++at) {
    for (const auto& part : needs_of(schedule_.actions[rank][at], schedule_.stages())) {
      if (!made_.contains(part)) return part;
    }
  }
  return {};
}

} // namespace tessera::internal::pipeline
