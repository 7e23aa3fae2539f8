#include <tessera/parallel/run/step_run.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/parallel/pipeline/dependencies.h>

namespace tessera::internal::pipeline {

namespace {

/// A list of tensors as a value.
FlatValue flat_list(std::vector<at::Tensor> tensors) {
  return {.structure = "[T" + std::string(tensors.size(), 'T') + "]", .tensors = std::move(tensors)};
}

const char* part_of(PipelineWork work) {
  switch (work) {
    case PipelineWork::kForward: return "the forward";
    case PipelineWork::kBackward: return "the backward";
    case PipelineWork::kInputGradients: return "the first half of the backward";
    case PipelineWork::kWeightGradients: return "the second half of the backward";
    case PipelineWork::kUnshard: return "the gathers";
    case PipelineWork::kReshard: return "the freeing";
  }
  return "an action";
}

} // namespace

StepRun::StepRun(PipelineState& state, const StepInput& input)
    : state_(state),
      input_(input),
      nodes_(state.stages),
      loss_(at::zeros({}, at::TensorOptions(at::kDouble).device(state.stages.mesh.device()))) {
  LayerSeeds seeds{state.options.seed, state.steps_done * state.data_ranks() + state.data_rank()};
  for (const auto& stage : state.stages.local) runs_.emplace_back(state.stages, stage, seeds);
}

bool StepRun::is_here(int64_t stage) const {
  return state_.stages.rank_of_stage[static_cast<size_t>(stage)] == state_.stages.rank();
}

size_t StepRun::index_of(int64_t stage) const {
  const auto found = std::find_if(runs_.begin(), runs_.end(), [&](const StageRun& run) { return run.stage().index == stage; });
  return static_cast<size_t>(found - runs_.begin());
}

std::string StepRun::place() const {
  if (!now_) return "between the actions of a step, or at its end";
  const auto& run = runs_[index_of(now_->stage)];
  auto where = c10::str("in ", run.is_in_layer() ? "" : c10::str(now_->what, " of "), run.place());
  if (now_->micro_batch < 0) return where;
  return c10::str(where, ", micro-batch ", now_->micro_batch, " of ", input_.micro_batches.size());
}

MicroBatchScope StepRun::scope_of(const PipelineAction& action) {
  const auto& sharded = sharded_of(action.stage);
  const bool ends = action.work == PipelineWork::kBackward || action.work == PipelineWork::kWeightGradients;
  const bool is_last = ends && --remaining_.at(sharded.root().get()) == 0;
  return sharded.enter(action.work, action.micro_batch, is_last && input_.options.is_last);
}

MessageName StepRun::message(const char* what, int64_t stage, int64_t micro_batch, int64_t peer_stage) const {
  return {.peer = state_.stages.rank_of_stage[static_cast<size_t>(peer_stage)],
          .text = c10::str(what, " of stage ", stage, ", micro-batch ", micro_batch, " of ", input_.micro_batches.size()),
          .shape = c10::str(stage, " ", input_.key, " ", input_.shapes[static_cast<size_t>(micro_batch)])};
}

void StepRun::note(const std::vector<PipelineAction>& actions) {
  for (const auto& action : actions) {
    const bool ends = action.work == PipelineWork::kBackward || action.work == PipelineWork::kWeightGradients;
    if (ends) ++remaining_[sharded_of(action.stage).root().get()];
    if (action.work == PipelineWork::kInputGradients) split_.emplace(action.stage, action.micro_batch);
  }
}

void StepRun::train(const PipelineSchedule& schedule) {
  const auto& actions = schedule.actions[static_cast<size_t>(state_.stages.rank())];
  note(actions);
  for (size_t i = 0; i < actions.size(); ++i) {
    if (i + 1 < actions.size()) ask_ahead(actions[i], actions[i + 1]);
    if (input_.times) input_.times->begin();
    now_ = {part_of(actions[i].work), actions[i].stage, actions[i].micro_batch};
    if (actions[i].work == PipelineWork::kUnshard) gather_ahead(actions, i);
    perform(actions[i]);
    now_.reset();
    if (input_.times) input_.times->end();
    state_.forward.drop_sent();
    state_.backward.drop_sent();
  }
  state_.forward.wait_for_sent();
  state_.backward.wait_for_sent();
  state_.not_split.assign(not_split_.begin(), not_split_.end());
}

/// All micro-batches of a stage before the next stage: there is no backward that would wait.
void StepRun::evaluate(bool wants_loss) {
  for (auto& run : runs_) {
    for (int64_t micro_batch = 0; micro_batch < std::ssize(input_.micro_batches); ++micro_batch) {
      const auto stage = run.stage().index;
      now_ = {part_of(PipelineWork::kForward), stage, micro_batch};
      auto value = input_.micro_batches[static_cast<size_t>(micro_batch)];
      if (stage > 0) {
        value = unflatten(received(state_.forward, asked_outputs_, message("outputs", stage - 1, micro_batch, stage - 1),
                                   {stage - 1, micro_batch}));
      }
      value = run.forward(micro_batch, value, input_.micro_batches[static_cast<size_t>(micro_batch)], /*splits=*/false);
      if (!is_last(stage)) {
        pass_on(run, micro_batch, value);
      } else if (wants_loss) {
        take_loss(run, micro_batch, value);
      } else {
        outputs_.push_back(std::move(value));
      }
      now_.reset();
      state_.forward.drop_sent();
    }
  }
  state_.forward.wait_for_sent();
}

void StepRun::perform(const PipelineAction& action) {
  switch (action.work) {
    case PipelineWork::kForward: return forward(action);
    case PipelineWork::kBackward:
    case PipelineWork::kInputGradients: return backward(action);
    case PipelineWork::kWeightGradients: return weight_gradients(action);
    case PipelineWork::kUnshard: return; // the first read gathers what gather_ahead has not
    case PipelineWork::kReshard: return sharded_of(action.stage).free();
  }
}

/// Starts the first gathers of the stage that is gathered from that action on, beside what is computed and waited for until its
/// turn.
void StepRun::gather_ahead(const std::vector<PipelineAction>& actions, size_t gather) {
  const auto stage = actions[gather].stage;
  const auto next = std::find_if(actions.begin() + static_cast<std::ptrdiff_t>(gather), actions.end(),
                                 [&](const auto& action) { return action.stage == stage && computes(action.work); });
  if (next != actions.end()) sharded_of(stage).gather_ahead(next->work);
}

/// Asks for the message that the next action needs before this one computes, so that it comes meanwhile. Not where this action
/// sends in the same direction: over one stream of a device its message would wait behind what was asked for, and the other rank
/// for it.
void StepRun::ask_ahead(const PipelineAction& now, const PipelineAction& next) {
  if (next.work == PipelineWork::kForward && now.work != PipelineWork::kForward && next.stage > 0 && !is_here(next.stage - 1)) {
    const auto name = message("outputs", next.stage - 1, next.micro_batch, next.stage - 1);
    if (state_.forward.knows(name)) asked_outputs_.emplace(Place(next.stage - 1, next.micro_batch), state_.forward.ask(name));
  }
  if (gives_input_gradients(next.work) && !gives_input_gradients(now.work) && !is_last(next.stage) && !is_here(next.stage + 1) &&
      run_of(next.stage).has_graph(next.micro_batch)) {
    const auto name = message("gradients of the outputs", next.stage, next.micro_batch, next.stage + 1);
    if (state_.backward.knows(name)) asked_gradients_.emplace(Place(next.stage, next.micro_batch), state_.backward.ask(name));
  }
}

FlatValue StepRun::received(Messages& messages, std::map<Place, Incoming>& asked, const MessageName& name, Place place) {
  auto& local = &messages == &state_.forward ? local_outputs_ : local_gradients_;
  if (auto here = local.extract(place)) return std::move(here.mapped());
  auto there = asked.extract(place);
  auto value = messages.take(there ? std::move(there.mapped()) : messages.ask(name));
  if (input_.times) input_.times->begin();
  return value;
}

void StepRun::forward(const PipelineAction& action) {
  const auto stage = action.stage, micro_batch = action.micro_batch;
  const auto& batch = input_.micro_batches[static_cast<size_t>(micro_batch)];
  auto value = batch;
  if (stage > 0) {
    value = unflatten(received(state_.forward, asked_outputs_, message("outputs", stage - 1, micro_batch, stage - 1),
                               {stage - 1, micro_batch}));
  }
  auto& run = run_of(stage);
  const auto scope = scope_of(action);
  const auto output = run.forward(micro_batch, value, batch, split_.contains({stage, micro_batch}));
  if (is_last(stage)) {
    take_loss(run, micro_batch, output);
  } else {
    pass_on(run, micro_batch, output);
  }
  check_graph(run, micro_batch, value);
}

void StepRun::pass_on(StageRun& run, int64_t micro_batch, const PipelineValue& output) {
  const auto stage = run.stage().index;
  auto flat = flatten(output, "the output of " + run.name());
  if (at::GradMode::is_enabled()) run.keep_graph(micro_batch, flat.tensors);
  if (!is_here(stage + 1)) return state_.forward.send(flat, message("outputs", stage, micro_batch, stage + 1));
  for (auto& tensor : flat.tensors) {
    if (tensor.defined()) tensor = tensor.detach().requires_grad_(tensor.requires_grad());
  }
  local_outputs_.emplace(Place(stage, micro_batch), std::move(flat));
}

void StepRun::take_loss(StageRun& run, int64_t micro_batch, const PipelineValue& output) {
  const auto forward = std::exchange(now_, Part{"the loss", run.stage().index, micro_batch});
  const auto sum = state_.loss.sum(output, input_.micro_batches[static_cast<size_t>(micro_batch)]);
  TORCH_CHECK(sum.defined() && sum.dim() == 0, "rank ", process_context().rank(),
              ": the loss of a pipeline must have no dims, and has ", sum.defined() ? sum.dim() : -1);
  {
    const at::NoGradGuard no_grad;
    const auto value = sum.detach();
    loss_ = loss_ + (is_dtensor(value) ? DTensor(value).full_tensor() : value).to(at::kDouble);
  }
  if (at::GradMode::is_enabled()) keep_loss(run, micro_batch, sum);
  now_ = forward;
}

/// The beginning of the backward.
void StepRun::keep_loss(StageRun& run, int64_t micro_batch, const at::Tensor& sum) {
  auto root = sum * input_.factor;
  if (input_.options.scale) root = input_.options.scale(root);
  run.keep_graph(micro_batch, {root});
  loss_roots_[micro_batch] = at::ones_like(root, root.options().requires_grad(false));
}

/// A stage that trains must have a way from its outputs to what it trains.
void StepRun::check_graph(StageRun& run, int64_t micro_batch, const PipelineValue& input) {
  const auto& stage = run.stage();
  const auto needs_gradient = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  const auto parameters = stage.module->parameters();
  const auto inputs = stage.index > 0 ? tensors_of(input) : std::vector<at::Tensor>();
  const bool trains = std::any_of(parameters.begin(), parameters.end(), needs_gradient) ||
                      std::any_of(inputs.begin(), inputs.end(), needs_gradient);
  TORCH_CHECK(!trains || run.has_graph(micro_batch), "rank ", process_context().rank(), ": the ",
              is_last(stage.index) ? "loss" : "output", " of ", run.name(),
              " requires no gradient, so that none would reach its parameters and the stages before it");
  if (micro_batch > 0) return;
  const auto names = nodes_.reached(run.edges(micro_batch), stage.index);
  if (split_.contains({stage.index, micro_batch})) not_split_.insert(names.begin(), names.end());
}

void StepRun::backward(const PipelineAction& action) {
  const auto stage = action.stage, micro_batch = action.micro_batch;
  auto& run = run_of(stage);
  std::vector<at::Tensor> gradients;
  if (is_last(stage)) {
    if (run.has_graph(micro_batch)) gradients.push_back(loss_roots_.at(micro_batch));
    loss_roots_.erase(micro_batch);
  } else if (run.has_graph(micro_batch)) {
    gradients = received(state_.backward, asked_gradients_, message("gradients of the outputs", stage, micro_batch, stage + 1),
                         {stage, micro_batch})
                    .tensors;
  }
  const auto scope = scope_of(action);
  auto of_inputs = run.backward(micro_batch, gradients);
  if (stage == 0 || of_inputs.empty()) return;
  auto flat = flat_list(std::move(of_inputs));
  if (is_here(stage - 1)) {
    local_gradients_.emplace(Place(stage - 1, micro_batch), std::move(flat));
  } else {
    state_.backward.send(flat, message("gradients of the outputs", stage - 1, micro_batch, stage - 1));
  }
}

void StepRun::weight_gradients(const PipelineAction& action) {
  const auto scope = scope_of(action);
  run_of(action.stage).weight_gradients(action.micro_batch);
}

} // namespace tessera::internal::pipeline
