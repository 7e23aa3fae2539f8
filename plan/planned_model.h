#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/activations/recompute_options.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/context_attention.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/plan_for.h>
#include <tessera/parallel/styles.h>
#include <tessera/plan/settings.h>

namespace tessera {

/// How a planned model runs one batch, or one micro-batch.
struct PassSettings {
  int64_t rows = 1;       ///< of this rank
  bool recompute = false; ///< the blocks of the model are recomputed in backward, each as a whole
  RecomputeKeeps keeps = RecomputeKeeps::kNothing;
  /// The ranks among which each sequence is split, of one dim; undefined: none. The batch is this rank's part.
  DeviceMesh context = {};
  ContextParallel context_scheme = ContextParallel::kAllGather;
  PartOrder context_order = PartOrder::kHeadTail;

  /// For the `recompute` of one block: a policy that keeps what `keeps` says, and counts its products anew.
  RecomputeOptions recompute_options() const;
};

/// A model that the planner can build on the meta device, shard and step. `read_model` makes one of a folder of Hugging
/// Face's; a program fills in the fields for a module of its own. Functions run on every simulated rank, so that they must not
/// change what they hold.
struct PlannedModel {
  std::string name; ///< for reports: "Llama-3-8B"
  /// The module, unsharded. Called under `on_meta`.
  std::function<std::shared_ptr<torch::nn::Module>()> build;
  /// Modules, each of which is a group of `fully_shard`, by patterns as those of a PlanLine: "model.layers.*". What they leave
  /// is the root's group.
  std::vector<std::string> groups = {};

  /// What a pass computes with: what it has of values may be anything that the model takes, on the device of its parameters.
  std::function<PipelineValue(const PassSettings&, at::Device device)> batch;
  /// Runs the forward, with recomputation where the settings say so, and returns the loss, without dims.
  std::function<at::Tensor(torch::nn::Module&, const PipelineValue& batch, const PassSettings&)> loss;

  /// The plan of `parallelize`, whose ranks divide what it splits. Empty: the model cannot be tensor parallel.
  std::function<ParallelPlan(torch::nn::Module&, const PlanOptions&)> tensor_parallel = nullptr;
  /// The layers that a pipeline is cut from, with recomputation where the settings say so. Empty: there is no pipeline.
  std::function<PipelineLayers(torch::nn::Module&, const PassSettings&)> layers = nullptr;
  /// The loss of the last layer's output, in a pipeline.
  PipelineLoss pipeline_loss = {};

  /// Linear layers that do not multiply in fp8, as `Float8Options::except` names them: the head.
  std::vector<std::string> not_in_float8 = {};

  int64_t experts = 0;          ///< of a `MoE` in it, among whose ranks they can be split; 0: there is none
  int64_t sequence = 0;         ///< positions of a row, all of which count as tokens; 0: a row is one sample
  bool splits_sequence = false; ///< whether `context` may be set
  /// The operations of a row's forward and backward by the model's formula, without recomputation: the numerator of model FLOPS
  /// utilization. 0: those of the matrix products that a plain step runs.
  double flops_a_row = 0;
};

} // namespace tessera
