#include <tessera/parallel/pipeline.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/parallel/run/pipeline_state.h>
#include <tessera/parallel/run/step_run.h>

namespace tessera {

using internal::pipeline::PipelineState, internal::pipeline::shape_of;
using internal::pipeline::StepInput, internal::pipeline::StepRun;

namespace {

std::vector<std::string> shapes_of(const std::vector<PipelineValue>& micro_batches) {
  std::vector<std::string> shapes;
  for (const auto& each : micro_batches) shapes.push_back(shape_of(each));
  return shapes;
}

/// Runs a step; after an exception the other ranks hear of it.
template <typename Run>
void run_or_abandon(PipelineState& state, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    const auto here = internal::error_text(error);
    const auto text = state.abandon(here);
    if (text == here) throw;
    TORCH_CHECK(false, text);
  } catch (...) {
    state.abandon("an exception that is no std::exception");
    throw;
  }
}

/// The losses of a scaler's steps on ranks that have none.
void scale_nothing(const PipelineState& state, const PipelineStepOptions& options) {
  if (!options.scale || state.stages.rank_of_stage.back() == state.stages.rank()) return;
  options.scale(at::zeros({}, at::TensorOptions(state.stages.mesh.device())));
}

at::Tensor train(PipelineState& state, const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options) {
  std::string failure;
  const PipelineSchedule* schedule = nullptr;
  try {
    schedule = &state.schedule(std::ssize(micro_batches));
    internal::check_not_stepped_in_backward(state.stages.module->parameters(),
                                            "a step of a pipeline adds the gradients of its micro-batches and of tied weights");
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  }
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches), .options = options};
  input.key = state.agree("a step", input.shapes, failure);
  const double count = options.count ? *options.count : state.count_of(micro_batches);
  input.factor = static_cast<double>(state.data_ranks()) / count;
  StepRun run(state, input);
  state.ties.begin();
  at::Tensor loss;
  run_or_abandon(state, [&] {
    run.train(*schedule);
    loss = state.over_stages(run.loss());
  });
  scale_nothing(state, options);
  if (options.is_last) {
    state.ties.sum();
    ++state.steps_done;
  }
  return state.over_data(loss, "loss of a pipeline").reshape({}) / count;
}

} // namespace

Pipeline::Pipeline(PipelineStages stages, PipelineScheduleKind kind, PipelineLoss loss, PipelineOptions options)
    : state_(std::make_unique<PipelineState>(std::move(stages), std::move(loss), std::move(options), kind, std::nullopt)) {}
Pipeline::Pipeline(PipelineStages stages, PipelineSchedule schedule, PipelineLoss loss, PipelineOptions options)
    : state_(std::make_unique<PipelineState>(std::move(stages), std::move(loss), std::move(options), std::nullopt,
                                             std::move(schedule))) {}
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;
Pipeline::~Pipeline() = default;

at::Tensor Pipeline::step(const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options) {
  state_->check_usable();
  TORCH_CHECK(at::GradMode::is_enabled(), "Pipeline::step was called without grad mode; `evaluate` needs none");
  return train(*state_, micro_batches, options);
}

at::Tensor Pipeline::evaluate(const std::vector<PipelineValue>& micro_batches) {
  state_->check_usable();
  const at::NoGradGuard no_grad;
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches)};
  input.key = state_->agree("an evaluation", input.shapes, micro_batches.empty() ? "an evaluation without micro-batches" : "");
  StepRun run(*state_, input);
  at::Tensor loss;
  run_or_abandon(*state_, [&] {
    run.evaluate(/*wants_loss=*/true);
    loss = state_->over_stages(run.loss());
  });
  return state_->over_data(loss, "loss of a pipeline").reshape({}) / state_->count_of(micro_batches);
}

std::vector<PipelineValue> Pipeline::predict(const std::vector<PipelineValue>& micro_batches) {
  state_->check_usable();
  const at::NoGradGuard no_grad;
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches)};
  input.key = state_->agree("a prediction", input.shapes, "");
  StepRun run(*state_, input);
  run_or_abandon(*state_, [&] { run.evaluate(/*wants_loss=*/false); });
  return run.take_outputs();
}

const PipelineStages& Pipeline::stages() const { return state_->stages; }
const PipelineSchedule& Pipeline::schedule(int64_t micro_batches) const { return state_->schedule(micro_batches); }
const std::vector<std::string>& Pipeline::not_split() const { return state_->not_split; }

} // namespace tessera
