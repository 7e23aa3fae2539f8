#pragma once

// Internal: what a pipeline keeps from step to step.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/run/messages.h>
#include <tessera/parallel/run/sharded_stage.h>
#include <tessera/parallel/run/tie_sums.h>

namespace tessera::internal::pipeline {

class PipelineState {
 public:
  PipelineState(PipelineStages pipeline_stages, PipelineLoss pipeline_loss, PipelineOptions pipeline_options,
                std::optional<PipelineScheduleKind> schedule_kind, std::optional<PipelineSchedule> own_schedule);

  const PipelineSchedule& schedule(int64_t micro_batches);
  /// What all ranks of the pipeline must have alike at the beginning of a step, as a key of the messages' shapes, in which
  /// `options` are not. Throws on all of them where they differ, or `mistake` says that this one cannot go on.
  std::string agree(const std::string& what, const std::vector<std::string>& shapes, const std::string& mistake,
                    const std::string& options = "") const;
  /// The terms of the loss here.
  double terms_of(const std::vector<PipelineValue>& micro_batches) const;
  /// The terms over the data mesh.
  double over_all(double terms) const;
  /// Adds over the pipeline, whose ranks have then all come to this point.
  at::Tensor over_stages(const at::Tensor& loss);
  /// Adds over the data mesh.
  at::Tensor over_data(const at::Tensor& value, const char* label) const;
  int64_t data_ranks() const { return options.data_mesh.defined() ? options.data_mesh.size() : 1; }
  int64_t data_rank() const;
  void check_usable() const;
  /// After an exception with this text: the others hear of it. Returns the text with that of the rank that failed first.
  std::string abandon(const std::string& text);

  PipelineStages stages;
  PipelineLoss loss;
  PipelineOptions options;
  int64_t failures; ///< of pipelines on these ranks before this one, whose connections have ended
  Messages forward, backward;
  std::vector<ShardedStage> sharded; ///< as the local stages
  TieSums ties;
  std::vector<std::string> not_split;
  int64_t steps_done = 0;
  std::string failure; ///< after an exception, where it was first and what it said

 private:
  std::string take_schedule(std::optional<PipelineSchedule> own_schedule);

  std::optional<PipelineScheduleKind> kind_;
  std::map<int64_t, PipelineSchedule> schedules_; ///< by micro-batches
};

/// The structure, shapes and dtypes of a micro-batch.
std::string shape_of(const PipelineValue& micro_batch);

} // namespace tessera::internal::pipeline
