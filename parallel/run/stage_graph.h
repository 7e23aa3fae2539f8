#pragma once

// Internal: which parameters the graph of a stage's outputs leads to.

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/parallel/pipeline_stages.h>

namespace tessera::internal::pipeline {

/// The gradient accumulators of this rank's parameters.
class ParameterNodes {
 public:
  explicit ParameterNodes(const PipelineStages& stages);

  /// What the graph below `outputs` leads to: the names of parameters whose gradients come in the first half of a backward, where
  /// that is split. Throws for a parameter of another stage than `stage`.
  std::vector<std::string> reached(const std::vector<torch::autograd::Edge>& outputs, int64_t stage) const;

 private:
  struct Owner {
    std::string name;
    std::vector<int64_t> stages;
    std::shared_ptr<torch::autograd::Node> node; ///< which would end with the last graph
  };
  void check_is_of(const torch::autograd::Node* node, int64_t stage) const;

  const PipelineStages& stages_;
  std::map<const torch::autograd::Node*, Owner> owners_;
};

} // namespace tessera::internal::pipeline
