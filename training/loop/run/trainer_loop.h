#pragma once

// Internal: what a Trainer does, step after step.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/training/loop/run/checkpoints.h>
#include <tessera/training/loop/run/profile_window.h>
#include <tessera/training/loop/run/run_log.h>
#include <tessera/training/loop/step/agreement.h>
#include <tessera/training/loop/step/micro_batch_reader.h>
#include <tessera/training/loop/step/progress.h>
#include <tessera/training/loop/step/step_plan.h>
#include <tessera/training/loop/step/train_step.h>
#include <tessera/training/trainer_core.h>

namespace tessera::internal {

/// What lasts as long as a `run`.
struct RunState {
  using Clock = std::chrono::steady_clock;
  Clock::time_point start = Clock::now(), last_save = start, last_evaluation = start;
  std::optional<RunLog> log; ///< on the first rank
  std::string stop_text;
};

class TrainerLoop {
 public:
  TrainerLoop(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options,
              std::unique_ptr<MicroBatchWork> work);

  StepResult step(bool reads); ///< from the source, or of what is in the queue
  TrainingEnd run();
  bool resume();
  void save();
  std::vector<EvaluationEvent> evaluate();

  TrainerHooks& hooks() { return hooks_; }
  const Progress& progress() const { return progress_; }
  const TrainerOptions& options() const { return options_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct DataWait {
    double seconds = 0, share = 0; ///< of the last step
  };

  void check_usable() const;
  StepPlan plan_step(bool reads);
  void count_micro_batches(StepPlan& plan, int64_t micro_batches);
  bool is_whole(const StepPlan& plan) const;
  void check_rows(const StepPlan& plan);
  StepResult train(const StepPlan& plan, bool reads, Clock::time_point begin);
  void advance(const StepPlan& plan, bool reads, StepResult& result);
  void add_rates(StepResult& result, double seconds);
  Requests own_requests() const;
  StepPlan agree_without_step();

  TrainingEnd train_to_the_end();
  std::optional<StopReason> limit_reached() const;
  std::optional<StopReason> reason_in(const Requests& requests);
  /// What the requests ask for beside an end; whether it was not cut short.
  bool serve(const Requests& requests);
  bool work_due_after_step();
  TrainingEnd finish(StopReason reason);
  std::string text_of(StopReason reason) const;
  void open_log();
  void check_metrics() const;

  bool evaluate_all(); ///< false where a SIGTERM has cut it short
  std::optional<std::vector<EvaluationEvent>> evaluations(bool may_be_cut);
  void take_metrics(const std::vector<EvaluationEvent>& events);
  void save_regular();
  void mark_saved();
  void tell_finished_saves();
  double seconds() const;

  template <typename Event>
  void write(const Event& event) {
    if (run_ && run_->log) agreement_.run("the log", [&] { run_->log->write(event); });
  }
  /// Calls the functions of an event; what they throw is noted, and what they ask for is kept.
  template <typename Handlers, typename Event>
  void call(const char* name, const Handlers& handlers, const Event& event) {
    for (const auto& handler : handlers) agreement_.run(name, [&] { handler(event, control_); });
  }

  TrainerOptions options_;
  std::unique_ptr<MicroBatchWork> work_;
  TrainerHooks hooks_;
  Agreement agreement_;
  Trained trained_;
  MicroBatchReader reader_;
  TrainStep train_step_;
  Checkpoints checkpoints_;
  ProfileWindow profile_;
  Progress progress_;
  Control control_;                         ///< what events' functions have asked for
  std::optional<RunState> run_;             ///< while `run` runs
  std::optional<ResumeEvent> resume_event_; ///< until it is told
  DataWait data_wait_;
  Clock::time_point start_ = Clock::now();
  double seconds_before_ = 0; ///< of earlier processes
  int64_t steps_here_ = 0;    ///< of this one
  bool has_tried_resume_ = false, checks_rows_ = false, leaves_rows_to_last_step_ = false, saved_is_current_ = false,
       stops_early_ = false;
  bool has_failed_ = false; ///< a step, which may have left gradients
};

} // namespace tessera::internal
