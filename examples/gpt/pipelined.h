#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/checkpoint/state_dict.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <vector>

#include "gpt/model.h"
#include "gpt/options.h"
#include "gpt/text.h"

namespace gpt {

/// A Gpt whose layers are on the ranks of a mesh's first dim, pp, sharded over the others. Its blocks are layers, and so are the
/// embedding and the head.
class PipelinedGpt {
 public:
  /// Every rank of the mesh makes it.
  PipelinedGpt(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options);

  /// What this rank has of the model.
  torch::nn::Module& module() { return *pipeline_.stages().module; }
  /// Forward and backward of a batch, in micro-batches. Returns the loss over all ranks.
  torch::Tensor train(const Batch& batch, const std::function<torch::Tensor(const torch::Tensor&)>& scale);
  torch::Tensor evaluate(const Batch& batch) { return pipeline_.evaluate(micro_batches_of(batch)); }
  /// Clips the gradients of all stages to `largest` together. Returns their norm before.
  torch::Tensor clip(double largest) { return tessera::clip_grad_norm_(pipeline_.stages(), largest); }
  /// What this rank saves or loads. A weight that two ranks hold is saved by one, and loaded by both.
  tessera::StateDict state(torch::optim::Optimizer& optimizer, bool saves);

 private:
  std::vector<tessera::PipelineValue> micro_batches_of(const Batch& batch) const;

  int64_t micro_batches_;
  tessera::Pipeline pipeline_;
};

} // namespace gpt
