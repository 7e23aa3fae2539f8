#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>

namespace tessera {

/// A learning rate that depends on the step and on nothing else, so that it can be saved and resumed. A LibTorch scheduler: call
/// `step()` after each `optimizer.step()`.
///
/// The constructor takes the lr of each parameter group as that group's base, and sets the lr of step 0 at once, as in PyTorch;
/// n calls of `step()` set that of step n. (LibTorch's own schedulers set the first one with the first call.) So make it once,
/// for an optimizer that has the base rates: before a checkpoint is loaded into it. An error if all of them are 0, except with
/// `Rates::kAbsolute`. The optimizer must outlive it. Local: every rank makes the same and steps it as often.
class LRSchedule : public torch::optim::LRScheduler {
 public:
  /// The lr at step 0, 1, … of a group whose base is `base_lr`.
  using Formula = std::function<double(double base_lr, int64_t step)>;
  using Settings = std::map<std::string, StateValue>;

  /// What a formula makes of the base rates.
  enum class Rates {
    kOfBase,  ///< its rates depend on them
    kAbsolute ///< it leaves them out: they may be 0, and others at a resume
  };

  /// Your own schedule. `type` and `settings` are saved, and must be the same at a resume. `settings` should contain everything
  /// that the formula depends on.
  LRSchedule(torch::optim::Optimizer& optimizer, std::string type, Settings settings, Formula formula,
             Rates rates = Rates::kOfBase);
  LRSchedule(const LRSchedule&) = delete;
  LRSchedule& operator=(const LRSchedule&) = delete;

  /// How often `step()` was called, including the calls before a resume.
  int64_t steps_taken() const { return static_cast<int64_t>(step_count_); }
  /// Goes to another step, and sets its lr: for programs that keep the step themselves. An error below 0.
  void set_steps_taken(int64_t steps);
  /// What the optimizer's groups have at this step.
  std::vector<double> lrs() const { return lrs_at(steps_taken()); }
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  Rates rates() const { return rates_; }
  const std::string& type() const { return type_; }
  const Settings& settings() const { return settings_; }

 private:
  std::vector<double> get_lrs() override;
  void check_groups() const;
  std::vector<double> lrs_at(int64_t step) const;
  void apply() const;

  torch::optim::Optimizer* optimizer_;
  std::string type_;
  Settings settings_;
  Formula formula_;
  std::vector<double> base_lrs_;
  Rates rates_;
};

/// Steps count calls of `step()`. Ratios are relative to a group's base lr, finite and not negative. Other values are errors.
struct WarmupOptions {
  int64_t warmup_steps = 0; ///< the lr grows linearly from `start_ratio` at step 0 to the base at this step; 0: no warm-up
  /// From this step on the lr is `end_ratio`. Positive, and not less than `warmup_steps`. If they are equal, there is no decay.
  int64_t total_steps = 0;
  double start_ratio = 0;
  double end_ratio = 0;
};

/// Warm-up, then half a cosine down. Without warm-up PyTorch's CosineAnnealingLR(T_max = total_steps), which goes up again
/// afterwards; with it Hugging Face's get_cosine_schedule_with_warmup.
class WarmupCosineLR final : public LRSchedule {
 public:
  WarmupCosineLR(torch::optim::Optimizer& optimizer, const WarmupOptions& options);
};

/// Warm-up, then linearly down: Hugging Face's get_linear_schedule_with_warmup. PyTorch's LinearLR(start_factor, 1, total_iters)
/// is the warm-up alone: `warmup_steps` and `total_steps` are total_iters, and `end_ratio` is 1.
class WarmupLinearLR final : public LRSchedule {
 public:
  WarmupLinearLR(torch::optim::Optimizer& optimizer, const WarmupOptions& options);
};

/// How the last part of a WSDLR goes from 1 to 0, with p from 0 to 1.
enum class DecayShape {
  kCosine,       ///< half a cosine
  kLinear,       ///< 1 - p
  kOneMinusSqrt, ///< 1 - √p
};

struct WSDOptions {
  int64_t warmup_steps = 0; ///< as in WarmupOptions
  int64_t stable_steps = 0; ///< at the base
  int64_t decay_steps = 0;  ///< down to `end_ratio`, where it stays; positive
  double start_ratio = 0;
  double end_ratio = 0;
  DecayShape decay = DecayShape::kCosine;
};

/// Warm-up, stable, decay: Hugging Face's get_wsd_schedule, whose min_lr_ratio is both ratios here.
class WSDLR final : public LRSchedule {
 public:
  WSDLR(torch::optim::Optimizer& optimizer, const WSDOptions& options);
};

// DeepSpeed's schedules, with its names and defaults. As there, the first call of `step()` sets the lr of its iteration 0, and
// until then it is the lowest: the first two updates run at it. Where the warm-up takes one step, DeepSpeed takes two.

/// How the warm-up grows (DeepSpeed: warmup_type).
enum class WarmupShape {
  kLog,   ///< ln(iteration + 1) / ln(warmup_num_steps)
  kLinear ///< iteration / warmup_num_steps
};

/// Learning rates, not ratios.
struct WarmupLROptions {
  double warmup_min_lr = 0;
  /// Unset: the group's own lr. Otherwise the groups' own do not count (`LRSchedule::Rates::kAbsolute`).
  std::optional<double> warmup_max_lr;
  int64_t warmup_num_steps = 1000; ///< positive
  WarmupShape warmup_type = WarmupShape::kLog;
};

/// DeepSpeed's WarmupLR: from the lowest to the highest lr, which stays.
class WarmupLR final : public LRSchedule {
 public:
  WarmupLR(torch::optim::Optimizer& optimizer, const WarmupLROptions& options);
};

/// These are learning rates, not ratios: the groups' own do not count (`LRSchedule::Rates::kAbsolute`).
struct WarmupDecayOptions {
  int64_t total_num_steps = 0; ///< positive
  double warmup_min_lr = 0;
  double warmup_max_lr = 0.001;
  int64_t warmup_num_steps = 1000; ///< positive, and not more than `total_num_steps`
  WarmupShape warmup_type = WarmupShape::kLog;
};

/// DeepSpeed's WarmupDecayLR: warm-up from the lowest to the highest lr, then linearly to 0.
class WarmupDecayLR final : public LRSchedule {
 public:
  WarmupDecayLR(torch::optim::Optimizer& optimizer, const WarmupDecayOptions& options);
};

/// Ratios of the groups' own lr.
struct WarmupCosineRatioOptions {
  int64_t total_num_steps = 0; ///< positive
  double warmup_min_ratio = 0;
  int64_t warmup_num_steps = 1000; ///< positive, and not more than `total_num_steps`
  double cos_min_ratio = 0.0001;
  WarmupShape warmup_type = WarmupShape::kLog;
};

/// DeepSpeed's WarmupCosineLR: warm-up to the group's lr, then half a cosine down to `cos_min_ratio` of it. Before the first call
/// of `step()` the lr is 0, whatever the ratios are.
class WarmupCosineRatioLR final : public LRSchedule {
 public:
  WarmupCosineRatioLR(torch::optim::Optimizer& optimizer, const WarmupCosineRatioOptions& options);
};

struct ScheduleStateOptions {
  /// The beginning of the names; a different one for each schedule of a state dict.
  std::string name = "lr_schedule";
  /// If the saved settings, type or base rates differ, continue at the saved step with those of the schedule here, instead of an
  /// error: for a run that is made longer. A load of the optimizer sets the lr of the saved schedule, so merge the state of this
  /// schedule after the optimizer's.
  bool allow_other_settings = false;
};

/// The state of a schedule: `state.merge(state_dict(schedule))`.
///   "<name>.type", "<name>.steps_taken"; of an LRSchedule also "<name>.base_lrs" and "<name>.settings.<setting>".
///
/// A load sets the step, and of an LRSchedule the optimizer's lr. LibTorch's StepLR, and other classes derived from LRScheduler,
/// keep the lr in the optimizer alone: save that as well. Their own settings are not known, and not compared. Of an LRSchedule
/// all that was saved must be as here, except base rates that do not count; differences are an error on every rank, which lists
/// them, before anything is loaded. The schedule must outlive the state dict. Local.
StateDict state_dict(torch::optim::LRScheduler& schedule, const ScheduleStateOptions& options = {});

} // namespace tessera
