// Which of a rank's stages are gathered when.
#include <tessera/parallel/pipeline/schedule_shapes.h>

#include <algorithm>

namespace tessera::internal::pipeline {

namespace {

bool contains(const std::vector<int64_t>& stages, int64_t stage) {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

/// The `count` stages that compute next, from `begin` on. Those of two actions that overlap are needed together.
std::vector<int64_t> next_stages(const std::vector<PipelineAction>& actions, size_t begin, int64_t count) {
  std::vector<int64_t> stages;
  for (size_t i = begin; i < actions.size(); ++i) {
    const bool goes_with_last = i > begin && actions[i - 1].overlaps_next;
    if (static_cast<int64_t>(stages.size()) >= count && !goes_with_last) break;
    if (!contains(stages, actions[i].stage)) stages.push_back(actions[i].stage);
  }
  return stages;
}

} // namespace

std::vector<PipelineAction> with_gathers(const std::vector<PipelineAction>& actions, int64_t active) {
  std::vector<PipelineAction> compute, result;
  std::copy_if(actions.begin(), actions.end(), std::back_inserter(compute),
               [](const PipelineAction& action) { return action.micro_batch >= 0; });
  std::vector<int64_t> gathered;
  for (size_t i = 0; i < compute.size(); ++i) {
    const bool goes_with_last = i > 0 && compute[i - 1].overlaps_next;
    const auto wanted = goes_with_last ? gathered : next_stages(compute, i, active);
    std::erase_if(gathered, [&](int64_t stage) {
      const bool frees = !contains(wanted, stage);
      if (frees) result.push_back({PipelineWork::kReshard, stage});
      return frees;
    });
    for (const auto stage : wanted) {
      if (contains(gathered, stage)) continue;
      gathered.push_back(stage);
      result.push_back({PipelineWork::kUnshard, stage});
    }
    result.push_back(compute[i]);
  }
  for (const auto stage : gathered) result.push_back({PipelineWork::kReshard, stage});
  return result;
}

} // namespace tessera::internal::pipeline
