#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/fsdp/micro_batch.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/pipeline_layers.h>
#include <tessera/parallel/pipeline_schedule.h>
#include <tessera/parallel/pipeline_stages.h>

namespace tessera {

namespace internal::pipeline {
class PipelineState;
}

/// The loss of a pipeline's last stage, as a sum and what it is divided by.
struct PipelineLoss {
  /// The sum over a micro-batch, without dims, of the last layer's output and the micro-batch. Called on the last stage's rank.
  std::function<at::Tensor(const PipelineValue& output, const PipelineValue& micro_batch)> sum;
  /// How many terms it has, for example tokens whose target counts. Called on every rank, of what the micro-batch says alone.
  /// Unset: 1, so that the loss is the mean of those of the micro-batches.
  std::function<double(const PipelineValue& micro_batch)> count = nullptr;
};

struct PipelineOptions {
  /// The ranks that have other micro-batches, such as mesh["dp"]: over them counts and losses are added, and `fully_shard`
  /// averages gradients. Undefined: this rank alone.
  DeviceMesh data_mesh = {};
  Residency residency = Residency::kStage; ///< how long what `fully_shard` gathers of a stage stays
  /// The most stages of a rank that are gathered at once, those that it computes next, as `with_residency` says. 0: all of them,
  /// or what a schedule of the program's own says.
  int64_t resident_stages = 0;
  /// Messages whose shapes depend on more than the shapes of their micro-batch: each comes with a header.
  bool dynamic_shapes = false;
  /// Draws random numbers of each layer with a seed of its own, made of this one, the number of the step, the micro-batch, the
  /// layer and the place in `data_mesh`: dropout is then the same under every schedule and on any number of stages. The seed is
  /// that of the process, so that ranks which are threads of one process must not share layers that draw.
  std::optional<uint64_t> seed = std::nullopt;
};

/// What one step does.
struct PipelineStepOptions {
  /// Called with each loss before its backward, in place of which its result is differentiated: for example
  /// `[&](const at::Tensor& loss) { return scaler.scale(loss); }`. Other ranks than the last stage's call it once, with 0.
  std::function<at::Tensor(const at::Tensor& loss)> scale = nullptr;
  /// false: another `step` follows before the optimizer's. Gradients are not reduced, nor those of tied weights added.
  bool is_last = true;
  /// What the losses' sum is divided by: of several steps before an optimizer's one. Unset: the terms of this step over all ranks
  /// of the data mesh.
  std::optional<double> count = std::nullopt;
};

/// A step whose actions were measured.
struct MeasuredPipelineStep {
  at::Tensor loss; ///< what `Pipeline::step` returns
  /// Says when each rank did what, in seconds. An action begins once its message is there, so that ranks wait between them. Each
  /// rank has its own clock, which begins with the step. The picture of it is `to_svg(times)`.
  PipelineSimulation times;
};

/// Trains a model whose layers are on several ranks: runs the actions of a schedule, and sends what goes from stage to stage
/// (PyTorch: torch.distributed.pipelining).
///
///   auto stages = split(layers, mesh["pp"]);
///   fully_shard(stages, mesh["dp"]);
///   Pipeline pipeline(stages, PipelineScheduleKind::kZeroBubbleH1, loss, {.data_mesh = mesh["dp"]});
///   torch::optim::AdamW optimizer(stages.parameters());
///   for (…) {
///     optimizer.zero_grad();
///     const auto loss = pipeline.step(micro_batches);
///     clip_grad_norm_(stages, 1.0);
///     optimizer.step();
///   }
///
/// The gradients are those of one process that adds the losses of all micro-batches and of the whole data mesh, and divides by
/// the count. Batch norms see each micro-batch, as under gradient accumulation.
///
/// An exception in a step keeps its type and says where it was: a c10::Error by a context, one of a type of <stdexcept> behind
/// its own words; those of other types come as they were thrown (see `failure`). The other ranks get a c10::Error with all of it,
/// and the pipeline cannot be used any more. What the step had gathered, reduced and counted is given up. All ranks may then make
/// a new one of the same stages: docs/pipeline.md, "After an exception".
class Pipeline {
 public:
  /// Takes any number of micro-batches that the kind can take. Every rank of the pipeline makes it alike. An error where the
  /// stages lie otherwise than the kind's.
  Pipeline(PipelineStages stages, PipelineScheduleKind kind, PipelineLoss loss, PipelineOptions options = {});
  /// Takes a schedule of the program's own, and its number of micro-batches.
  Pipeline(PipelineStages stages, PipelineSchedule schedule, PipelineLoss loss, PipelineOptions options = {});
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  ~Pipeline();

  /// Forward and backward of all micro-batches, which may have different shapes. Every rank of a pipeline calls it with the same
  /// ones: the first layer computes with them, any other may read them, and the loss. Each rank of the data mesh has its own.
  /// Returns the loss over the data mesh, without dims, the same on all of them. Adds to `grad()`.
  ///
  /// Errors, on every rank of the pipeline, before anything is sent: a number of micro-batches that the schedule cannot take
  /// (with the nearest that it can), ranks that were given others. Later, on the rank, from which the others then hear: a stage
  /// whose output does not depend on its parameters, layers that read another stage's parameter, a message of another shape.
  at::Tensor step(const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options = {});

  /// Does the same, and says when each rank did what. On a device these are the times of the host, which does not wait for
  /// its kernels.
  MeasuredPipelineStep measured_step(const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options = {});

  /// The loss alone, without gradients: the forwards of any number of micro-batches. Before, after or between steps. Every rank
  /// of the pipeline and of the data mesh calls it. Modules are in the mode that the program has set.
  at::Tensor evaluate(const std::vector<PipelineValue>& micro_batches);
  /// The last layer's outputs, on the rank of the last stage; nothing on the others. As `evaluate`.
  std::vector<PipelineValue> predict(const std::vector<PipelineValue>& micro_batches);

  const PipelineStages& stages() const;
  /// The schedule of so many micro-batches.
  const PipelineSchedule& schedule(int64_t micro_batches) const;
  /// Parameters of this rank whose gradients come with the first half of a backward that the schedule splits: biases and norms,
  /// and the weights of ops that cannot be split, such as a fused LSTM. Known after the first step.
  const std::vector<std::string>& not_split() const;
  /// What has ended the pipeline: the words of the first exception in a step, an evaluation or a prediction, its rank, and the
  /// layer, loss, backward or half of one, stage and micro-batch that it was in; then what this rank did. Empty before.
  const std::string& failure() const;

 private:
  std::unique_ptr<internal::pipeline::PipelineState> state_;
};

} // namespace tessera
