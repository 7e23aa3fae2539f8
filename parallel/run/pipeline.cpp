#include <tessera/parallel/pipeline.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include <tessera/base/error_text.h>
#include <tessera/base/placed_error.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/parallel/run/pipeline_state.h>
#include <tessera/parallel/run/step_run.h>

namespace tessera {

using internal::pipeline::PipelineState, internal::pipeline::shape_of;
using internal::pipeline::StepInput, internal::pipeline::StepRun, internal::pipeline::StepTimes;

namespace {

/// Ends before the first one that cannot be sent, and sets `mistake` to why: the other ranks must hear of it.
std::vector<std::string> shapes_of(const std::vector<PipelineValue>& micro_batches, std::string& mistake) {
  std::vector<std::string> shapes;
  try {
    for (const auto& each : micro_batches) shapes.push_back(shape_of(each));
  } catch (const c10::Error& error) {
    mistake = internal::error_text(error);
  }
  return shapes;
}

void check_can_step(const PipelineState& state) {
  state.check_usable();
  TORCH_CHECK(at::GradMode::is_enabled(), "Pipeline::step was called without grad mode; `evaluate` needs none");
}

/// Whether it may be of a connection that another rank has closed; all others are of the program's functions.
bool is_torch_error(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// Runs what `step` does; after an exception the other ranks hear of it, and where it was.
template <typename Run>
void run_or_abandon(PipelineState& state, const StepRun& step, const Run& run) {
  try {
    run();
  } catch (...) {
    const auto error = internal::placed_error(step.place());
    const auto text = state.abandon(error.text);
    TORCH_CHECK(text == error.text || !is_torch_error(error.thrown), text);
    std::rethrow_exception(error.thrown);
  }
}

/// The losses of a scaler's steps on ranks that have none.
void scale_nothing(const PipelineState& state, const PipelineStepOptions& options) {
  if (!options.scale || state.stages.rank_of_stage.back() == state.stages.rank()) return;
  options.scale(at::zeros({}, at::TensorOptions(state.stages.mesh.device())));
}

/// What ranks of a pipeline must have alike of them.
std::string to_text(const PipelineStepOptions& options) {
  std::string text = options.is_last ? "" : ", which is not the last one before the optimizer's";
  return options.count ? c10::str(text, ", with the count ", *options.count) : text;
}

/// What a step needs, of which each part may be an error here alone.
struct StepNeeds {
  const PipelineSchedule* schedule = nullptr;
  double terms = 0;    ///< of the loss here
  std::string failure; ///< why there is no step, of which the other ranks must hear
};

StepNeeds needs_of(PipelineState& state, const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options) {
  StepNeeds needs;
  try {
    needs.schedule = &state.schedule(std::ssize(micro_batches));
    TORCH_CHECK_VALUE(!options.count || *options.count > 0, "PipelineStepOptions::count is ", options.count.value_or(0),
                      ", by which a loss cannot be divided");
    internal::check_not_stepped_in_backward(state.stages.module->parameters(),
                                            "a step of a pipeline adds the gradients of its micro-batches and of tied weights");
    if (!options.count) needs.terms = state.terms_of(micro_batches);
  } catch (...) {
    needs.failure = internal::error_text(std::current_exception());
  }
  return needs;
}

/// Measures the step where `measured` is given.
at::Tensor train(PipelineState& state, const std::vector<PipelineValue>& micro_batches, const PipelineStepOptions& options,
                 PipelineSimulation* measured) {
  auto needs = needs_of(state, micro_batches, options);
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches, needs.failure), .options = options};
  input.key = state.agree("a step", input.shapes, needs.failure, to_text(options));
  const double count = options.count ? *options.count : state.over_all(needs.terms);
  input.factor = static_cast<double>(state.data_ranks()) / count;
  state.ties.begin();
  StepTimes times;
  if (measured) input.times = &times;
  StepRun run(state, input);
  at::Tensor loss;
  run_or_abandon(state, run, [&] {
    run.train(*needs.schedule);
    scale_nothing(state, options);
    loss = state.over_stages(run.loss());
  });
  if (measured)
    *measured = times.gather(*needs.schedule, *state.stages.mesh.communicator(0, "pipeline"), state.stages.mesh.device());
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
  check_can_step(*state_);
  return train(*state_, micro_batches, options, nullptr);
}

MeasuredPipelineStep Pipeline::measured_step(const std::vector<PipelineValue>& micro_batches,
                                             const PipelineStepOptions& options) {
  check_can_step(*state_);
  MeasuredPipelineStep step;
  step.loss = train(*state_, micro_batches, options, &step.times);
  return step;
}

at::Tensor Pipeline::evaluate(const std::vector<PipelineValue>& micro_batches) {
  state_->check_usable();
  const at::NoGradGuard no_grad;
  std::string failure = micro_batches.empty() ? "an evaluation without micro-batches" : "";
  double terms = 0;
  try {
    terms = state_->terms_of(micro_batches);
  } catch (...) {
    failure = internal::error_text(std::current_exception());
  }
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches, failure)};
  input.key = state_->agree("an evaluation", input.shapes, failure);
  StepRun run(*state_, input);
  at::Tensor loss;
  run_or_abandon(*state_, run, [&] {
    run.evaluate(/*wants_loss=*/true);
    loss = state_->over_stages(run.loss());
  });
  return state_->over_data(loss, "loss of a pipeline").reshape({}) / state_->over_all(terms);
}

std::vector<PipelineValue> Pipeline::predict(const std::vector<PipelineValue>& micro_batches) {
  state_->check_usable();
  const at::NoGradGuard no_grad;
  std::string failure = micro_batches.empty() ? "a prediction without micro-batches" : "";
  StepInput input{.micro_batches = micro_batches, .shapes = shapes_of(micro_batches, failure)};
  input.key = state_->agree("a prediction", input.shapes, failure);
  StepRun run(*state_, input);
  run_or_abandon(*state_, run, [&] {
    run.evaluate(/*wants_loss=*/false);
    state_->over_stages(at::zeros({})); // ranks that have done their part hear of an exception in a later stage
  });
  return run.take_outputs();
}

const PipelineStages& Pipeline::stages() const { return state_->stages; }
const PipelineSchedule& Pipeline::schedule(int64_t micro_batches) const { return state_->schedule(micro_batches); }
const std::vector<std::string>& Pipeline::not_split() const { return state_->not_split; }
const std::string& Pipeline::failure() const { return state_->failure; }

} // namespace tessera
