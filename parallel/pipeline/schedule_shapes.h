#pragma once

// Internal: which numbers of micro-batches a schedule can take, and where its stages are.

#include <tessera/parallel/pipeline_schedule.h>

namespace tessera::internal::pipeline {

/// Stages on ranks 0, 1, …, 0, 1, …
std::vector<int64_t> looped_ranks(int64_t ranks, int64_t chunks);
/// Stages on ranks 0, 1, …, 1, 0
std::vector<int64_t> v_ranks(int64_t ranks);

/// `shape` with its group, or an error.
PipelineShape checked_shape(PipelineScheduleKind kind, PipelineShape shape);

/// The orders of the kinds whose stages are looped, and of the two of a V.
std::vector<PipelineAction> looped_order(PipelineScheduleKind kind, const PipelineShape& shape, int64_t rank);
std::vector<PipelineAction> zero_bubble_v_order(const PipelineShape& shape, int64_t rank);
std::vector<PipelineAction> dual_pipe_v_order(const PipelineShape& shape, int64_t rank);

/// A rank's actions with what gathers and frees its stages, at most `active` of them at once but for two that overlap. What
/// `actions` has of these is left out.
std::vector<PipelineAction> with_gathers(const std::vector<PipelineAction>& actions, int64_t active);

} // namespace tessera::internal::pipeline
