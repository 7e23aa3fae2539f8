#pragma once

// Internal: stages of one rank that share a weight.

#include <algorithm>

#include <tessera/parallel/pipeline_stages.h>

namespace tessera::internal::pipeline {

/// Whether two stages of this rank read one weight. They are one model of `fully_shard` then, and else one each.
inline bool stages_share_weights(const PipelineStages& stages) {
  return std::any_of(stages.ties.begin(), stages.ties.end(), [&](const PipelineTie& tie) {
    return std::count_if(stages.local.begin(), stages.local.end(), [&](const PipelineStage& stage) {
             return std::count(tie.stages.begin(), tie.stages.end(), stage.index) > 0;
           }) > 1;
  });
}

} // namespace tessera::internal::pipeline
