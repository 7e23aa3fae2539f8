#pragma once

// Internal: which stage has what of a model, before anything is changed.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <tessera/parallel/pipeline_stages.h>
#include <tessera/parallel/stages/balance.h>

namespace tessera::internal::pipeline {

/// A parameter or buffer of the model.
struct ModelTensor {
  at::Tensor tensor;
  bool is_parameter = true;
  std::vector<std::string> names; ///< in the model's order
  std::set<size_t> layers;        ///< that have it
  std::vector<int64_t> stages;    ///< rising
  std::vector<int64_t> ranks;     ///< rising
};

struct StagePlan {
  /// Throws for what `split` says.
  StagePlan(const PipelineLayers& layers, int64_t ranks, const PipelineSplit& options);

  /// Whether it belongs to one of `stages`.
  static bool is_in(const ModelTensor& tensor, const std::set<int64_t>& stages);
  /// What all ranks must have alike, a line a layer.
  std::string to_text(const PipelineLayers& layers) const;

  std::vector<ModelTensor> tensors;
  std::vector<LayerSize> sizes; ///< of the layers
  std::vector<int64_t> rank_of_stage, bounds;

 private:
  void take_tensors(const PipelineLayers& layers);
  void take_sizes(const PipelineLayers& layers, const std::vector<double>& costs);
  void take_stages(const PipelineLayers& layers);
};

/// What `stages` have of the model, under its names: a module that is a member whole itself, others as empty modules with what
/// they own.
std::shared_ptr<torch::nn::Module> module_of_stages(const PipelineLayers& layers, const StagePlan& plan,
                                                    const std::set<int64_t>& stages);

} // namespace tessera::internal::pipeline
