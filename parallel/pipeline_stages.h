#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/expert_parallel.h>
#include <tessera/parallel/parallelize.h>
#include <tessera/parallel/pipeline_layers.h>

namespace tessera {

/// How `split` cuts layers into stages.
struct PipelineSplit {
  int64_t chunks = 1; ///< stages a rank: stage s is on rank s % ranks
  /// The rank of each stage instead, as `PipelineSchedule::rank_of_stage` says it; that of a V, for example.
  std::vector<int64_t> rank_of_stage = {};
  /// What each layer costs, as `time_layers` measures it. Empty: the number of its parameters. The stages are cut so that the
  /// dearest one costs as little as it can.
  std::vector<double> costs = {};
  /// The first layer of each stage but the first, rising; in place of `costs`.
  std::vector<int64_t> bounds = {};
};

/// A stage that this rank computes.
struct PipelineStage {
  int64_t index = 0;
  int64_t begin = 0, end = 0; ///< its layers
  /// What its layers have of the model, under the same full names.
  std::shared_ptr<torch::nn::Module> module;
};

/// A weight that layers of several stages read.
struct PipelineTie {
  std::string name;            ///< in full
  std::vector<int64_t> stages; ///< rising
  std::vector<int64_t> ranks;  ///< of the pipeline, rising: those that hold it; the first one owns it
};

/// A model that is cut into the stages of a pipeline, as one rank has it. Copies share the modules.
struct PipelineStages {
  PipelineLayers layers;
  DeviceMesh mesh; ///< the pipeline's, 1-D
  std::vector<int64_t> rank_of_stage;
  std::vector<int64_t> bounds;               ///< the first layer of each stage, and the number of layers
  std::vector<double> costs;                 ///< of each stage
  std::vector<PipelineStage> local;          ///< this rank's, by their numbers
  std::shared_ptr<torch::nn::Module> module; ///< all that this rank has of the model, under the model's names
  std::vector<PipelineTie> ties;             ///< those of all ranks

  int64_t count() const { return static_cast<int64_t>(rank_of_stage.size()); }
  int64_t rank() const { return mesh.local_rank(); }
  /// This rank's parameters, for an optimizer.
  std::vector<at::Tensor> parameters() const { return module->parameters(); }
  /// "stage 2 (layers 'blocks.3' to 'head')"
  std::string describe(int64_t stage) const;
  /// Whether this rank holds `name` as a copy whose owner is another rank: a tied parameter, or an entry of a state dict that
  /// belongs to one, such as its optimizer state or its average. A checkpoint leaves these out, where it is saved.
  bool is_copy(const std::string& name) const;
};

/// Cuts `layers` into stages on the ranks of the 1-D mesh `mesh`. What other ranks have of the model is or becomes a tensor on
/// the meta device, which no operator may read: a layer that does gets an error that names the parameter and both stages. What
/// this rank has stays as it is, on the meta device too: `materialize(*stages.module, init)` then gives it memory. Every rank of
/// the mesh calls it.
///
/// Errors, on every rank: ranks with other lists of layers; fewer layers than stages; a stage without parameters; a parameter or
/// buffer of the model that belongs to no layer; a parameter of layers on several ranks that is not declared as tied; parameters
/// that are sharded already.
PipelineStages split(const PipelineLayers& layers, const DeviceMesh& mesh, const PipelineSplit& options = {});

/// A line a stage: its rank, layers, parameters, cost, and how much dearer it is than the mean.
std::string to_string(const PipelineStages& stages);

/// `fully_shard` of what this rank has, over `mesh`, dims of the same root mesh as the pipeline's: each tied weight is a group of
/// its own, each layer is one, and each stage a root; where two stages of
/// the rank share a weight they have one root. Every rank of the pipeline and of `mesh` calls it.
void fully_shard(const PipelineStages& stages, const DeviceMesh& mesh, const FullyShardOptions& options = {});

/// `parallelize` of what this rank has, with those lines of `plan` that name something here. A line that names no module of the
/// whole model is an error. Every rank of the pipeline and of `mesh` calls it, before `fully_shard`.
void parallelize(const PipelineStages& stages, const DeviceMesh& mesh, const ParallelPlan& plan,
                 const ParallelizeOptions& options = {});

/// `expert_parallel` of what this rank has, over ranks that have the same stages; nothing where these have no experts. An error
/// where the whole model has none. Every rank of the pipeline and of `mesh` calls it, before `parallelize` and `fully_shard`.
void expert_parallel(const PipelineStages& stages, const DeviceMesh& mesh, const ExpertParallelOptions& options = {});

/// `clip_grad_norm_` over all stages: the norm of all gradients of the model, of tied weights once. Every rank of the pipeline,
/// and of the meshes of its parameters, calls it after a step. Without `fully_shard` every rank of a data mesh has its own.
// NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
at::Tensor clip_grad_norm_(const PipelineStages& stages, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false);

} // namespace tessera
