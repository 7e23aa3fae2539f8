// The kinds whose stages go round the ranks. One generator makes them all: they differ in how many forwards come before the first
// backward, and in how far weight gradients stay behind.
#include <tessera/parallel/pipeline/schedule_shapes.h>

#include <algorithm>

namespace tessera::internal::pipeline {

namespace {

using Kind = PipelineScheduleKind;
using Work = PipelineWork;

struct Order {
  int64_t first_forwards = 0; ///< before the first backward
  bool splits = false;
  int64_t behind = 0; ///< how many input gradients a weight gradient stays behind
};

Order order_of(Kind kind, const PipelineShape& shape, int64_t rank) {
  const auto after_it = shape.ranks - 1 - rank;
  const auto other_chunks = (shape.chunks - 1) * shape.group;
  switch (kind) {
    case Kind::kGPipe:
    case Kind::kLoopedBFS: return {.first_forwards = shape.chunks * shape.micro_batches};
    case Kind::k1F1B: return {.first_forwards = after_it};
    case Kind::kInterleaved1F1B: return {.first_forwards = other_chunks + 2 * after_it};
    case Kind::kZeroBubbleH1:
    case Kind::kInterleavedZeroBubble: return {.first_forwards = other_chunks + after_it, .splits = true, .behind = rank};
    case Kind::kZeroBubbleV:
    case Kind::kDualPipeV: break;
  }
  return {};
}

/// Group after group of micro-batches through the rank's stages.
struct Lists {
  std::vector<PipelineAction> forwards, backwards;
};

Lists lists_of(Kind kind, const PipelineShape& shape, int64_t rank) {
  Lists lists;
  for (int64_t first = 0; first < shape.micro_batches; first += shape.group) {
    const auto end = std::min(first + shape.group, shape.micro_batches);
    for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (auto at = first; at < end; ++at) {
        const auto mirrored = kind == Kind::kLoopedBFS ? end - 1 - (at - first) : at;
        lists.forwards.push_back({Work::kForward, chunk * shape.ranks + rank, at});
        lists.backwards.push_back({Work::kBackward, (shape.chunks - 1 - chunk) * shape.ranks + rank, mirrored});
      }
    }
  }
  return lists;
}

} // namespace

std::vector<PipelineAction> looped_order(Kind kind, const PipelineShape& shape, int64_t rank) {
  const auto order = order_of(kind, shape, rank);
  const auto lists = lists_of(kind, shape, rank);
  const auto count = lists.forwards.size();
  const auto half = [](PipelineAction action, Work work) {
    action.work = work;
    return action;
  };
  std::vector<PipelineAction> actions;
  size_t forward = 0, backward = 0, weights = 0;
  while (forward < std::min(count, static_cast<size_t>(order.first_forwards))) actions.push_back(lists.forwards[forward++]);
  while (backward < count) {
    if (forward < count) actions.push_back(lists.forwards[forward++]);
    const auto& next = lists.backwards[backward++];
    actions.push_back(order.splits ? half(next, Work::kInputGradients) : next);
    if (order.splits && backward > static_cast<size_t>(order.behind))
      actions.push_back(half(lists.backwards[weights++], Work::kWeightGradients));
  }
  for (; order.splits && weights < count; ++weights) actions.push_back(half(lists.backwards[weights], Work::kWeightGradients));
  return actions;
}

} // namespace tessera::internal::pipeline
