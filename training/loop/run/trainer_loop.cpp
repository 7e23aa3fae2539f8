#include <tessera/training/loop/run/trainer_loop.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/fsdp/model/module_walk.h>
#include <tessera/training/loop/run/check_options.h>
#include <tessera/training/loop/run/signals.h>

namespace tessera::internal {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The mesh of the options, or all ranks of the job.
DeviceMesh mesh_of(const torch::nn::Module& module, const TrainerOptions& options) {
  if (options.mesh.defined()) return options.mesh;
  auto type = at::kCPU;
  any_parameter(module, [&](const at::Tensor& parameter) {
    type = parameter.device().type();
    return true;
  });
  TORCH_CHECK_VALUE(type != at::kMeta,
                    "Trainer: the parameters are on the meta device: materialize them, or set TrainerOptions::mesh");
  return init_device_mesh(type, {process_context().world_size()}, {"ranks"});
}

Agreement agreement_of(const torch::nn::Module& module, const TrainerOptions& options) {
  const auto mesh = mesh_of(module, options);
  return {mesh, options.data_mesh.defined() ? options.data_mesh : mesh};
}

} // namespace

TrainerLoop::TrainerLoop(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options,
                         std::unique_ptr<MicroBatchWork> work)
    : options_((check_options(options), std::move(options))),
      work_(std::move(work)),
      agreement_(agreement_of(module, options_)),
      trained_{module, optimizer, options_, hooks_, *work_, agreement_},
      reader_(*work_, options_.micro_batches),
      train_step_(trained_),
      checkpoints_(trained_, train_step_.scaler()),
      profile_(options_.profile) {}

double TrainerLoop::seconds() const { return seconds_before_ + seconds_since(start_); }

// --- a step

void TrainerLoop::count_micro_batches(StepPlan& plan, int64_t micro_batches) {
  plan.micro_batches = micro_batches;
  for (size_t i = 0; i < static_cast<size_t>(micro_batches); ++i) {
    const auto count = work_->count(i);
    TORCH_CHECK_VALUE(count,
                      "a loss without count: neither the program nor the batch's type tells how many terms the loss of a "
                      "batch has; give the trainer a count()");
    TORCH_CHECK_VALUE(std::isfinite(*count) && *count >= 0, "micro-batch ", i, " counts ", *count,
                      ", but a count is finite and not negative");
    const auto rows = work_->rows(i);
    TORCH_CHECK_VALUE(!rows || (std::isfinite(*rows) && *rows >= 0), "micro-batch ", i, " has ", rows.value_or(0),
                      " rows, but their number is finite and not negative");
    plan.counts.push_back(*count);
    plan.count += *count;
    plan.rows += rows.value_or(*count);
    plan.counts_rows |= rows.has_value();
  }
}

Requests TrainerLoop::own_requests() const {
  Requests requests{.stop = control_.stop_reason().has_value(), .save = control_.saves(), .evaluate = control_.evaluates()};
  if (!run_) return requests;
  const auto is_due = [](std::chrono::milliseconds every, Clock::time_point last) {
    return every.count() > 0 && Clock::now() - last >= every;
  };
  requests.save |= SignalScope::is_save_asked() || is_due(options_.save.every.time, run_->last_save);
  requests.evaluate |= is_due(options_.evaluate.time, run_->last_evaluation);
  requests.terminated = SignalScope::is_terminated();
  requests.out_of_time = is_due(options_.stop_after.run_time, run_->start);
  return requests;
}

StepPlan TrainerLoop::plan_step(bool reads) {
  const auto begin = Clock::now();
  if (reads) agreement_.run("the data source", [&] { reader_.fill(); });
  data_wait_.seconds = seconds_since(begin);
  StepPlan plan;
  if (!agreement_.has_failed()) {
    plan.ends_epoch = reads && reader_.ends_epoch();
    agreement_.run("the count of the micro-batches", [&] {
      const auto micro_batches = reads ? reader_.ready() : static_cast<int64_t>(work_->size());
      TORCH_CHECK_VALUE(micro_batches > 0, "a step without a micro-batch");
      count_micro_batches(plan, micro_batches);
    });
  }
  plan.requests = own_requests();
  plan.seconds = seconds();
  agree_on_step(plan, agreement_);
  if (reads) check_rows(plan);
  return plan;
}

bool TrainerLoop::is_whole(const StepPlan& plan) const {
  return plan.micro_batches == options_.micro_batches && !plan.ends_epoch;
}

/// Whole steps after a resume have as many rows as those before: otherwise the run goes on with other steps. The step before the
/// last of an epoch may leave a row for each rank to the last one.
void TrainerLoop::check_rows(const StepPlan& plan) {
  if (plan.ends_epoch) leaves_rows_to_last_step_ = false;
  // Rows that nobody counts are the terms, which are not equally many in each step.
  if (!checks_rows_ || !plan.counts_rows || !is_whole(plan)) return;
  const auto rows = static_cast<int64_t>(plan.rows), before = progress_.rows_a_step;
  if (before == 0 || rows == before || options_.save.other_settings == OtherSettings::kAccept) {
    progress_.rows_a_step = rows;
    checks_rows_ = false;
    return;
  }
  TORCH_CHECK(!leaves_rows_to_last_step_ && std::abs(rows - before) < agreement_.data_ranks(), "Trainer: a step has ", rows,
              " rows, but those before the resume had ", before,
              ": keep the product of ranks, rows of a micro-batch and micro-batches, or accept other settings with "
              "SaveOptions::other_settings");
  leaves_rows_to_last_step_ = true;
}

void TrainerLoop::advance(const StepPlan& plan, bool reads, StepResult& result) {
  ++progress_.steps;
  progress_.seconds = plan.seconds;
  if (reads) {
    progress_.position = reader_.consume();
  } else {
    work_->drop(work_->size());
  }
  if (plan.ends_epoch) ++progress_.epochs;
  const bool is_first = progress_.rows_a_step == 0;
  if (is_first || (is_whole(plan) && !checks_rows_))
    progress_.rows_a_step = std::max(progress_.rows_a_step, static_cast<int64_t>(plan.rows));
  result.ends_epoch = plan.ends_epoch;
  result.epochs = progress_.epochs;
  result.rows = static_cast<int64_t>(plan.rows);
  result.count = plan.count;
}

void TrainerLoop::add_rates(StepResult& result, double seconds) {
  result.seconds = seconds;
  result.data_seconds = data_wait_.seconds;
  result.rows_per_second = static_cast<double>(result.rows) / seconds;
  result.counts_per_second = result.count / seconds;
  const auto peak = options_.flops.peak_of_a_rank * static_cast<double>(agreement_.size());
  if (peak > 0) result.flops_utilization = options_.flops.a_row * result.rows_per_second / peak;
  data_wait_.share = data_wait_.seconds / seconds;
}

StepResult TrainerLoop::train(const StepPlan& plan, bool reads, Clock::time_point begin) {
  profile_.begin_step(steps_here_);
  has_failed_ = true; // unless it returns
  auto result = train_step_.run(plan, progress_, data_wait_.share);
  has_failed_ = false;
  advance(plan, reads, result);
  agreement_.run("the profile", [&] { profile_.end_step(++steps_here_); });
  add_rates(result, seconds_since(begin));
  saved_is_current_ = false;
  write(result);
  call("a function of on_step", hooks_.on_step, result);
  return result;
}

void TrainerLoop::check_usable() const {
  TORCH_CHECK(!has_failed_,
              "Trainer: an earlier call has failed within a step, which may have left gradients that the next one would add to: "
              "make the model and the trainer anew, and resume");
}

StepResult TrainerLoop::step(bool reads) {
  check_usable();
  const auto begin = Clock::now();
  return train(plan_step(reads), reads, begin);
}

} // namespace tessera::internal
