#pragma once

// Internal: a backward in two halves: the gradients of a stage's inputs, and those of its weights.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/edge.h>

#include <vector>

#include <tessera/base/per_thread.h>
#include <tessera/parallel/backward/weight_queue.h>

namespace tessera::internal::pipeline {

/// A key above that of reads, which a scope includes for its thread. It is that of nn/sync_batch_norm.cpp, which has it on
/// tensors and for another operator, and registers that all others fall through it.
inline constexpr c10::DispatchKey kSplitKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// The scope of a forward whose backward comes in two halves. In it, the ops of this thread that multiply activations by weights
/// (`kSplitOps`) leave the gradients of the weights to `queue`. A weight is a leaf, or a view or cast of one. The op's own node
/// is taken out of the graph, and one put in its place that has edges to activations alone. In the first half of the backward
/// that runs the op's node with the weights' edges cut; `WeightQueue::run` runs it again, with these edges and no others. So
/// kernels, and the way to a weight's accumulator with all its hooks, are autograd's, and all numbers bitwise those of a plain
/// backward.
class SplitBackward {
 public:
  explicit SplitBackward(WeightQueuePtr queue);

 private:
  const ScopedValue<WeightQueuePtr> queue_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// The edges that a node leaves to the second half; none of any other node.
std::vector<torch::autograd::Edge> weight_edges(const torch::autograd::Node& node);

} // namespace tessera::internal::pipeline
