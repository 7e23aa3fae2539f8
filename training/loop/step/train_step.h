#pragma once

// Internal: a training step, from the seeds to the averages.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>

#include <tessera/training/grad_scaler.h>
#include <tessera/training/loop/step/agreement.h>
#include <tessera/training/loop/step/loss_sums.h>
#include <tessera/training/loop/step/part_clock.h>
#include <tessera/training/loop/step/progress.h>
#include <tessera/training/loop/step/step_plan.h>
#include <tessera/training/trainer_core.h>

namespace tessera::internal {

/// What a trainer trains, and how.
struct Trained {
  torch::nn::Module& module;
  torch::optim::Optimizer& optimizer;
  const TrainerOptions& options;
  TrainerHooks& hooks;
  MicroBatchWork& work;
  Agreement& agreement;
};

class TrainStep {
 public:
  explicit TrainStep(const Trained& trained);

  /// Trains on the first micro-batches of the queue. Every rank calls it, with what they have agreed on. `progress` is that
  /// before the step; of it only `non_finite_in_a_row` changes.
  StepResult run(const StepPlan& plan, Progress& progress, double data_wait_share);

  GradScaler& scaler() { return scaler_; }

 private:
  void check_model() const;
  LossSums forward_and_backward(const StepPlan& plan, int64_t step, StepParts& parts);
  LossSums run_replaced(const StepPlan& plan);
  void run_micro_batch(size_t index, const StepPlan& plan, LossSums& sums, StepParts& parts);
  at::Tensor scaled(const Loss& loss, const at::Tensor& tensor, double count, const StepPlan& plan) const;
  void clip(StepResult& result);
  /// The norm before clipping, for which 0 is no limit.
  double clip_to(double limit);
  /// Whether the optimizer has stepped.
  bool step_optimizer(bool is_finite);
  /// Steps the optimizer, and with it the schedules and the averages.
  StepOutcome advance(bool is_finite);
  void check_finite(const StepPlan& plan, Progress& progress, bool is_finite, const StepResult& result);
  double learning_rate() const;

  Trained it_;
  GradScaler scaler_;
  PartClock clock_;
  AgreedNames names_;
  bool is_checked_ = false; ///< `check_model`
};

} // namespace tessera::internal
