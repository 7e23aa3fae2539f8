#pragma once

// Internal: the second half of a backward, the gradients of weights, of one stage and one micro-batch.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace tessera::internal::pipeline {

/// What an op leaves for the second half. It is a root of that backward's graph, with edges to weights alone, and has the
/// sequence number of the op's own node, so that weights come in the order of a plain backward.
class WeightNode final : public torch::autograd::Node {
 public:
  /// `own`: the op's node, whose edges to activations are cut; `gradient`: what came to it.
  WeightNode(std::shared_ptr<torch::autograd::Node> own, at::Tensor gradient);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& unused) override;
  std::string name() const override { return "WeightGradients"; }
  /// What the engine is given in the place of the gradient, which would live until all nodes have run.
  const at::Tensor& signal() const { return signal_; }

 private:
  std::shared_ptr<torch::autograd::Node> own_;
  at::Tensor gradient_, signal_;
};

class WeightQueue {
 public:
  /// Notes an op of the forward that will leave something.
  void expect() { ++expected_; }
  void add(std::shared_ptr<WeightNode> node) { nodes_.push_back(std::move(node)); }
  /// How many ops of the forward will.
  size_t expected() const { return expected_; }
  /// Runs them as a backward of its own, and frees what they hold.
  void run();

 private:
  std::vector<std::shared_ptr<WeightNode>> nodes_;
  size_t expected_ = 0;
};
using WeightQueuePtr = std::shared_ptr<WeightQueue>;

} // namespace tessera::internal::pipeline
