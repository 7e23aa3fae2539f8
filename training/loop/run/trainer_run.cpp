// The run of a TrainerLoop: when it saves, evaluates and ends.
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <tessera/training/loop/run/evaluation.h>
#include <tessera/training/loop/run/signals.h>
#include <tessera/training/loop/run/trainer_loop.h>

namespace tessera::internal {

namespace {

bool is_due(const Every& every, int64_t steps) { return every.steps > 0 && steps % every.steps == 0; }

} // namespace

bool TrainerLoop::resume() {
  has_tried_resume_ = true;
  const auto resumed = checkpoints_.resume();
  if (!resumed) return false;
  progress_ = resumed->progress;
  if (work_->has_source()) {
    agreement_.run("the data source's seek", [&] { reader_.seek(progress_.position); });
    agreement_.check();
  }
  seconds_before_ = progress_.seconds;
  start_ = Clock::now();
  checks_rows_ = true;
  saved_is_current_ = true;
  const auto& stop = options_.early_stop;
  stops_early_ = stop && progress_.early_stop.without_improvement >= stop->patience;
  resume_event_ = ResumeEvent{.folder = resumed->folder, .step = progress_.steps, .differences = resumed->differences};
  call("a function of on_resume", hooks_.on_resume, *resume_event_);
  agreement_.check();
  return true;
}

StepPlan TrainerLoop::agree_without_step() {
  StepPlan plan;
  plan.requests = own_requests();
  plan.seconds = seconds();
  agree_on_requests(plan, agreement_);
  progress_.seconds = plan.seconds;
  return plan;
}

// --- checkpoints

void TrainerLoop::tell_finished_saves() {
  for (const auto& event : checkpoints_.finished()) {
    write(event);
    call("a function of on_save", hooks_.on_save, event);
  }
}

void TrainerLoop::save_regular() {
  if (!checkpoints_.is_enabled()) return;
  tell_finished_saves();
  checkpoints_.save(progress_, CheckpointKind::kRegular);
  saved_is_current_ = true;
  mark_saved();
}

void TrainerLoop::mark_saved() {
  if (run_) run_->last_save = Clock::now();
  SignalScope::answer_save();
}

void TrainerLoop::save() {
  TORCH_CHECK_VALUE(checkpoints_.is_enabled(), "Trainer: save() needs TrainerOptions::save.folder");
  check_usable();
  agree_without_step();
  has_tried_resume_ = true; // a run goes on from here
  save_regular();
  tell_finished_saves();
  agreement_.check();
}

// --- evaluations

std::optional<std::vector<EvaluationEvent>> TrainerLoop::evaluations(bool may_be_cut) {
  const auto is_to_stop = [&] { return may_be_cut && SignalScope::is_terminated(); };
  std::vector<EvaluationEvent> events;
  for (const auto& work : hooks_.evaluations) {
    auto event = internal::evaluate(trained_.module, work, progress_.steps, agreement_, is_to_stop);
    if (!event) return std::nullopt;
    events.push_back(*std::move(event));
  }
  return events;
}

std::vector<EvaluationEvent> TrainerLoop::evaluate() {
  check_usable();
  check_names(hooks_.evaluations);
  auto events = evaluations(/*may_be_cut=*/false).value();
  for (const auto& event : events) call("a function of on_evaluate", hooks_.on_evaluate, event);
  agreement_.check();
  return events;
}

void TrainerLoop::take_metrics(const std::vector<EvaluationEvent>& events) {
  if (options_.early_stop || !options_.save.best.empty()) saved_is_current_ = false; // a checkpoint holds what these have seen
  if (const auto& stop = options_.early_stop) {
    improve(progress_.early_stop, metric_in(events, stop->metric), progress_.steps, stop->better, stop->min_change);
    stops_early_ = progress_.early_stop.without_improvement >= stop->patience;
  }
  const auto& save = options_.save;
  if (save.best.empty()) return;
  if (!improve(progress_.best, metric_in(events, save.best), progress_.steps, save.better, /*min_change=*/0)) return;
  tell_finished_saves();
  checkpoints_.save(progress_, CheckpointKind::kBest);
}

bool TrainerLoop::evaluate_all() {
  if (hooks_.evaluations.empty()) return true;
  if (progress_.evaluation_is_due) saved_is_current_ = false; // a checkpoint says so
  progress_.evaluation_is_due = true;
  const auto events = evaluations(/*may_be_cut=*/true);
  if (!events) {
    saved_is_current_ = false;
    return false;
  }
  progress_.evaluation_is_due = false;
  progress_.evaluated_at = progress_.steps;
  run_->last_evaluation = Clock::now();
  for (const auto& event : *events) {
    write(event);
    call("a function of on_evaluate", hooks_.on_evaluate, event);
  }
  take_metrics(*events); // which may save: a run that is killed has told what a checkpoint holds
  return true;
}

// --- the run

void TrainerLoop::check_metrics() const {
  check_names(hooks_.evaluations);
  check_metric(hooks_.evaluations, options_.save.best, "TrainerOptions::save.best");
  if (options_.early_stop) check_metric(hooks_.evaluations, options_.early_stop->metric, "TrainerOptions::early_stop.metric");
}

void TrainerLoop::open_log() {
  agreement_.run("the log", [&] {
    if (agreement_.is_first()) run_->log.emplace(options_, progress_.steps);
  });
  if (resume_event_) write(*std::exchange(resume_event_, std::nullopt));
  agreement_.check();
}

std::optional<StopReason> TrainerLoop::limit_reached() const {
  const auto& limits = options_.stop_after;
  if (stops_early_) return StopReason::kEarlyStop;
  if (limits.steps > 0 && progress_.steps >= limits.steps) return StopReason::kSteps;
  if (limits.epochs > 0 && progress_.epochs >= limits.epochs) return StopReason::kEpochs;
  return std::nullopt;
}

std::optional<StopReason> TrainerLoop::reason_in(const Requests& requests) {
  if (requests.terminated) return StopReason::kTerminated;
  if (requests.stop) {
    for (const auto& text : agreement_.texts(control_.stop_reason().value_or(""))) {
      if (run_->stop_text.empty()) run_->stop_text = text;
    }
    return StopReason::kAsked;
  }
  if (requests.out_of_time) return StopReason::kRunTime;
  return std::nullopt;
}

bool TrainerLoop::serve(const Requests& requests) {
  control_ = {};
  if (requests.evaluate && progress_.evaluated_at != progress_.steps && !evaluate_all()) return false;
  if (requests.save && !saved_is_current_) save_regular();
  if (requests.save) mark_saved();
  return true;
}

bool TrainerLoop::work_due_after_step() {
  if (is_due(options_.evaluate, progress_.steps) && !evaluate_all()) return false;
  if (is_due(options_.save.every, progress_.steps)) save_regular();
  return true;
}

TrainingEnd TrainerLoop::train_to_the_end() {
  if (progress_.evaluation_is_due && !evaluate_all()) return finish(StopReason::kTerminated);
  while (true) {
    if (const auto reason = limit_reached()) return finish(*reason);
    const auto begin = Clock::now();
    const auto plan = plan_step(/*reads=*/true);
    if (const auto reason = reason_in(plan.requests)) return finish(*reason);
    if (!serve(plan.requests)) return finish(StopReason::kTerminated);
    if (stops_early_) continue;
    train(plan, /*reads=*/true, begin);
    if (!work_due_after_step()) return finish(StopReason::kTerminated);
  }
}

std::string TrainerLoop::text_of(StopReason reason) const {
  switch (reason) {
    case StopReason::kSteps: return fmt::format("{} steps are done", progress_.steps);
    case StopReason::kEpochs: return fmt::format("{} epochs are done", progress_.epochs);
    case StopReason::kRunTime: return fmt::format("the {} s of this run are over", options_.stop_after.run_time.count() / 1000.0);
    case StopReason::kTerminated: return "a SIGTERM";
    case StopReason::kAsked: return run_->stop_text;
    case StopReason::kEarlyStop:
      return fmt::format("\"{}\" did not improve in {} evaluations", options_.early_stop->metric,
                         progress_.early_stop.without_improvement);
  }
  return "";
}

/// The functions of the last step's events are heard here.
TrainingEnd TrainerLoop::finish(StopReason reason) {
  const auto requests = agree_without_step().requests;
  control_ = {};
  if (requests.terminated) reason = StopReason::kTerminated;
  const bool has_come_to_its_end =
      reason == StopReason::kSteps || reason == StopReason::kEpochs || reason == StopReason::kEarlyStop;
  const bool evaluates = (has_come_to_its_end || (requests.evaluate && reason != StopReason::kTerminated)) &&
                         progress_.evaluated_at != progress_.steps && !hooks_.evaluations.empty();
  if (evaluates && !evaluate_all()) reason = StopReason::kTerminated;
  agreement_.run("the profile", [&] { profile_.finish(); });
  if (!saved_is_current_) save_regular();
  tell_finished_saves();
  const TrainingEnd end{.reason = reason, .text = text_of(reason), .steps = progress_.steps, .epochs = progress_.epochs};
  write(end);
  for (const auto& handler : hooks_.on_stop) agreement_.run("a function of on_stop", [&] { handler(end); });
  if (run_->log) agreement_.run("the log", [&] { run_->log->finish(); });
  agreement_.check();
  return end;
}

TrainingEnd TrainerLoop::run() {
  check_usable();
  check_metrics();
  const SignalScope signals; // a SIGTERM in a resume is one before the first step
  if (!has_tried_resume_) resume();
  run_.emplace();
  try {
    open_log();
    auto end = train_to_the_end();
    run_.reset();
    return end;
  } catch (...) {
    run_.reset();
    throw;
  }
}

} // namespace tessera::internal
