#include <tessera/training/loop/step/train_step.h>

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <variant>

#include <tessera/base/error_text.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/setup/trains_apart.h>
#include <tessera/optim/grad_norm.h>
#include <tessera/optim/parts/backward_mark.h>
#include <tessera/optim/step.h>
#include <tessera/parallel/moe.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/loop/step/check_model.h>
#include <tessera/training/loop/step/memory_numbers.h>
#include <tessera/training/loop/step/non_finite_search.h>
#include <tessera/training/seeds.h>

namespace tessera::internal {

namespace {

constexpr int64_t kMostInARow = 3; // steps that are not finite; the last is an error

GradScalerOptions scaler_options(const Trained& trained) {
  auto options = trained.options.scaler;
  if (!options.mesh.defined()) options.mesh = trained.agreement.mesh(); // all skip a step together
  return options;
}

/// This rank's own gradients where an optimizer is to reduce them by itself (`set_keeps_own_gradients`): a norm of their means
/// would reduce them whole.
at::Tensor counted(const at::Tensor& gradient) {
  const auto* meta = dtensor_meta(gradient);
  const auto is_own = [](const Placement& each) { return is_partial(each) && std::get<Partial>(each).op == Partial::Op::kAvg; };
  if (!meta) return gradient;
  const auto& placements = meta->spec->placements();
  return std::any_of(placements.begin(), placements.end(), is_own) ? meta->local : gradient;
}

std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_not_ignored(module)) {
    if (parameter.grad().defined()) gradients.push_back(counted(parameter.grad()));
  }
  return gradients;
}

} // namespace

TrainStep::TrainStep(const Trained& trained)
    : it_(trained), scaler_(scaler_options(trained)), clock_(trained.options.log.breakdown, trained.agreement.mesh().device()) {}

void TrainStep::check_model() const {
  if (it_.work.replaces()) return; // what the program runs may average gradients by itself
  TORCH_CHECK_VALUE(it_.work.has_loss(), "Trainer: there is no loss: call loss() before step() or run()");
  check_trains_together(it_.module, it_.optimizer, it_.agreement.data_ranks());
}

/// So that each term of the step counts alike, after the average over the data ranks.
at::Tensor TrainStep::scaled(const Loss& loss, const at::Tensor& tensor, double count, const StepPlan& plan) const {
  const auto ranks = static_cast<double>(it_.agreement.data_ranks()), micro_batches = static_cast<double>(plan.micro_batches);
  if (std::holds_alternative<LossSum>(loss)) return tensor * (ranks / plan.count);
  const bool is_average = ranks * count * micro_batches == plan.count;
  if (!is_average) return tensor * (count * ranks / plan.count);
  return plan.micro_batches == 1 ? tensor : tensor / micro_batches; // to the bit what a plain loop computes
}

void TrainStep::run_micro_batch(size_t index, const StepPlan& plan, LossSums& sums, StepParts& parts) {
  std::optional<NoSync> accumulate; // only the last backward communicates gradients
  if (index + 1 < plan.counts.size()) accumulate.emplace(it_.module);
  const auto count = plan.counts[index];
  const auto loss = it_.work.loss(index);
  const auto tensor = sums.add(loss, count, fmt::format("micro-batch {}", index), it_.agreement);
  TORCH_CHECK_VALUE(tensor.requires_grad(), "the loss does not depend on a parameter that trains");
  clock_.add_to(parts.forward);
  scaler_.scale(scaled(loss, tensor, count, plan)).backward();
  clock_.add_to(parts.backward);
}

LossSums TrainStep::run_replaced(const StepPlan& plan) {
  const MicroBatchesContext context{.count = plan.count,
                                    .data_ranks = it_.agreement.data_ranks(),
                                    .scale = [this](const at::Tensor& loss) { return scaler_.scale(loss); }};
  double count = 0;
  for (const auto each : plan.counts) count += each;
  LossSums sums;
  sums.add(it_.work.run_all(plan.counts.size(), context), count, "the step", it_.agreement);
  return sums;
}

LossSums TrainStep::forward_and_backward(const StepPlan& plan, int64_t step, StepParts& parts) {
  size_t index = 0;
  try {
    manual_seed(it_.options.seed, step, it_.agreement.data_mesh());
    it_.optimizer.zero_grad();
    clock_.start();
    // Each micro-batch injects the losses of its routers.
    if (!it_.work.replaces()) set_router_loss_scale(it_.module, scaler_.get_scale() / static_cast<double>(plan.counts.size()));
    LossSums sums;
    if (it_.work.replaces()) {
      sums = run_replaced(plan);
      clock_.add_to(parts.backward);
    } else {
      for (; index < plan.counts.size(); ++index) run_micro_batch(index, plan, sums, parts);
    }
    return sums;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "Trainer: step ", step + 1, ", micro-batch ", index, " on rank ", process_context().rank(), ": ",
                error_text(error));
  }
}

void TrainStep::clip(StepResult& result) {
  scaler_.unscale_(it_.optimizer);
  const double limit = it_.options.max_grad_norm;
  result.grad_norm = clip_to(limit);
  if (limit > 0) result.clip_coefficient = std::min(1.0, limit / (result.grad_norm + 1e-6));
  clock_.add_to(result.parts.norm);
}

double TrainStep::clip_to(double limit) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (it_.options.non_finite == NonFinite::kSkip)
    check_not_stepped_in_backward(parameters_not_ignored(it_.module), "Trainer leaves out steps that are not finite (kSkip)");
  if (it_.hooks.clip) return it_.hooks.clip(limit > 0 ? limit : kNone).item<double>();
  if (limit > 0) return clip_grad_norm_(it_.module, limit).item<double>();
  return get_total_norm(gradients_of(it_.module)).item<double>();
}

bool TrainStep::step_optimizer(bool is_finite) {
  if (!scaler_.is_enabled()) {
    if (is_finite) tessera::step(it_.optimizer);
    return is_finite;
  }
  const bool has_stepped = scaler_.step(it_.optimizer);
  scaler_.update();
  return has_stepped;
}

/// Throws for a step that the policy does not leave out.
void TrainStep::check_finite(const StepPlan& plan, Progress& progress, bool is_finite, const StepResult& result) {
  if (is_finite) {
    progress.non_finite_in_a_row = 0;
    return;
  }
  ++progress.non_finite_in_a_row;
  const bool may_skip = scaler_.is_enabled() || it_.options.non_finite == NonFinite::kSkip;
  if (may_skip && progress.non_finite_in_a_row < kMostInARow) return;
  const auto found = find_non_finite(it_.module, it_.agreement, std::isnan(result.loss) || std::isnan(result.grad_norm), [&] {
    StepParts unused;
    forward_and_backward(plan, progress.steps, unused);
  });
  TORCH_CHECK(false, "Trainer: in step ", result.step, " the loss is ", result.loss, " and the norm of the gradients ",
              result.grad_norm, may_skip ? fmt::format(", the {}rd step in a row that is not finite", kMostInARow) : "",
              found.empty() ? "" : "; computed again, it comes from here:\n" + found);
}

double TrainStep::learning_rate() const {
  const auto& groups = it_.optimizer.param_groups();
  if (groups.empty() || !groups.front().has_options()) return std::numeric_limits<double>::quiet_NaN();
  try {
    return groups.front().options().get_lr();
  } catch (const c10::Error&) { // an optimizer of the program's own, whose options have none
    return std::numeric_limits<double>::quiet_NaN();
  }
}

StepResult TrainStep::run(const StepPlan& plan, Progress& progress, double data_wait_share) {
  if (!std::exchange(is_checked_, true)) check_model();
  StepResult result;
  result.step = progress.steps + 1;
  result.micro_batches = plan.micro_batches;
  result.learning_rate = learning_rate();
  result.loss_scale = scaler_.get_scale();
  const auto sums = forward_and_backward(plan, progress.steps, result.parts);
  clip(result);

  const auto device = it_.agreement.mesh().device();
  Beside beside{.sums = {data_wait_share, std::isfinite(result.grad_norm) ? 0.0 : 1.0},
                .maxima = {static_cast<double>(resident_bytes()), static_cast<double>(device_bytes(device))}};
  auto means = sums.reduce(it_.agreement, names_, beside);
  result.loss = means.loss;
  result.max_loss = means.max_loss;
  result.also = std::move(means.also);
  result.data_wait_share = beside.sums[0] / static_cast<double>(it_.agreement.size());
  result.resident_bytes = static_cast<int64_t>(beside.maxima[0]);
  result.device_bytes = static_cast<int64_t>(beside.maxima[1]);

  const bool is_finite = means.is_finite && (scaler_.is_enabled() || beside.sums[1] == 0);
  check_finite(plan, progress, is_finite, result);
  clock_.start();
  result.outcome = advance(is_finite);
  clock_.add_to(result.parts.optimizer);
  return result;
}

StepOutcome TrainStep::advance(bool is_finite) {
  if (!step_optimizer(is_finite)) return StepOutcome::kSkipped;
  for (auto* const schedule : it_.hooks.schedules) schedule->step();
  for (auto* const average : it_.hooks.averages) average->update_parameters(it_.module);
  return StepOutcome::kStepped;
}

} // namespace tessera::internal
