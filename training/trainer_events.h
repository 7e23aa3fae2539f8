#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// A number of a batch beside its loss, as an accuracy: what its rows add up to, and how many of them count.
struct SumAndCount {
  at::Tensor sum; ///< without dims, any real dtype
  double count = 0;
};

/// The loss of a micro-batch as a sum of terms. A step's gradients and loss are those of the sum over all ranks and
/// micro-batches, divided by the count over all of them.
struct LossSum {
  at::Tensor sum; ///< without dims
  /// Its terms; where it is given, it must be what `Trainer::count` said of the micro-batch. 0 is allowed.
  std::optional<double> count = std::nullopt;
  std::map<std::string, SumAndCount> also = {}; ///< the same names for every micro-batch, on every rank
};

/// The loss of a micro-batch as a mean, which weighs as much as the micro-batch has terms. Where all micro-batches of all ranks
/// have equally many, the gradients are to the bit those of `(mean / micro_batches).backward()`. A micro-batch without terms has
/// no mean: LossSum.
struct LossMean {
  at::Tensor mean; ///< without dims
  std::optional<double> count = std::nullopt;
  std::map<std::string, SumAndCount> also = {};
};

using Loss = std::variant<LossSum, LossMean>;

enum class StepOutcome {
  kStepped,
  kSkipped ///< gradients overflowed: neither the optimizer nor the schedule nor the averages have stepped
};

/// Seconds of this rank in the parts of a step, where `LogOptions::breakdown` asks for them: waits for other ranks are in the
/// parts that wait. (DeepSpeed: `wall_clock_breakdown`.)
struct StepParts {
  double forward = 0;   ///< of all micro-batches, with the loss
  double backward = 0;  ///< with the reductions of gradients; of micro-batches that the program runs itself, forwards too
  double norm = 0;      ///< unscaling, the norm, clipping
  double optimizer = 0; ///< with the schedules and the averages
};

/// The numbers of a training step, the same on every rank where nothing else is said.
struct StepResult {
  int64_t step = 0;        ///< steps done, with this one
  int64_t epochs = 0;      ///< epochs done
  bool ends_epoch = false; ///< the data's epoch has ended with this step
  int64_t micro_batches = 0;
  int64_t rows = 0;    ///< of all ranks
  double count = 0;    ///< terms of the loss, of all ranks
  double loss = 0;     ///< the exact mean over all ranks and micro-batches
  double max_loss = 0; ///< the largest of the ranks' own means
  std::map<std::string, double> also;
  double grad_norm = 0;        ///< before clipping
  double clip_coefficient = 1; ///< what clipping has multiplied the gradients by
  double learning_rate = 0;    ///< of this step, in the first parameter group; NaN for an optimizer without one
  double loss_scale = 1;       ///< of this step
  StepOutcome outcome = StepOutcome::kStepped;
  double seconds = 0;           ///< this rank's, with the wait for data
  double data_seconds = 0;      ///< this rank's wait for data
  double rows_per_second = 0;   ///< of all ranks, by this rank's clock
  double counts_per_second = 0; ///< the same of the loss's terms: tokens, where it counts them
  double data_wait_share = 0;   ///< of the time of the step before, the mean of all ranks
  double flops_utilization = 0; ///< of `FlopsOptions`, by this rank's clock; 0 where that is unset
  StepParts parts;              ///< of `seconds`
  int64_t resident_bytes = 0;   ///< memory of the process, of the rank that has most
  int64_t device_bytes = 0;     ///< allocated on the device, of the rank that has most; 0 on the CPU
};
using StepEvent = StepResult;

/// An evaluation over one epoch of its data: exact means over all ranks and batches.
struct EvaluationEvent {
  std::string name;
  int64_t step = 0;
  double loss = 0;
  double count = 0;
  std::map<std::string, double> also;
};

/// A checkpoint that is complete on disk. It was saved in the background: the event comes with the next save, or at the end.
struct SaveEvent {
  std::filesystem::path folder;
  int64_t step = 0;
  bool is_best = false;
};

/// A run that has gone on from a checkpoint.
struct ResumeEvent {
  std::filesystem::path folder;
  int64_t step = 0;
  std::vector<std::string> differences; ///< settings that are not those of the checkpoint, a line for each
};

enum class StopReason {
  kSteps,      ///< StopAfter::steps
  kEpochs,     ///< StopAfter::epochs
  kRunTime,    ///< StopAfter::run_time
  kTerminated, ///< a SIGTERM to some rank: `main` may end with status 143, which `launch` returns too
  kAsked,      ///< Control::stop
  kEarlyStop
};

/// Why `Trainer::run` has returned, the same on every rank.
struct TrainingEnd {
  StopReason reason = StopReason::kSteps;
  std::string text; ///< for people
  int64_t steps = 0;
  int64_t epochs = 0;
};
using StopEvent = TrainingEnd;

/// What an event's function asks the run for. It happens on all ranks, before the next step, also where one rank alone asks.
class Control {
 public:
  void stop(std::string reason) { stop_ = std::move(reason); }
  void save() { saves_ = true; }
  void evaluate() { evaluates_ = true; }

  const std::optional<std::string>& stop_reason() const { return stop_; }
  bool saves() const { return saves_; }
  bool evaluates() const { return evaluates_; }

 private:
  std::optional<std::string> stop_;
  bool saves_ = false, evaluates_ = false;
};

/// What a program that replaces the micro-batches' forwards and backwards needs to know of the step.
struct MicroBatchesContext {
  double count = 0;       ///< terms of the loss, of all ranks and micro-batches
  int64_t data_ranks = 1; ///< over which gradients are averaged
  /// The loss times the scale of a GradScaler, or the loss itself.
  std::function<at::Tensor(const at::Tensor& loss)> scale;
};

/// Which of its two uses a state dict is made for: a pipeline saves a tied weight on one rank, and loads it on two.
enum class StateUse { kSave, kLoad };

} // namespace tessera
