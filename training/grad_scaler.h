#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Says when the scale grows, and whether it moves at all.
enum class ScaleRule {
  kPyTorch, ///< it grows after `growth_interval` steps without an overflow, and again after as many
  /// As DeepSpeed's DynamicLossScaler: the same, but the first step of all, and the first one after an overflow, do not count
  kDeepSpeed,
  kFixed ///< it stays; steps that overflow are skipped all the same
};

/// What an overflow at the smallest scale is.
enum class AtMinScale {
  kError, ///< of `update`
  kStay   ///< a step that is skipped
};

/// The defaults are PyTorch's. Where DeepSpeed's differ, the comments name them.
struct GradScalerOptions {
  double init_scale = 65536;      ///< above 0; DeepSpeed's configs: 2^initial_scale_power
  double growth_factor = 2;       ///< above 1
  double backoff_factor = 0.5;    ///< above 0 and below 1
  int64_t growth_interval = 2000; ///< consecutive steps without an overflow after which the scale grows; DeepSpeed: 1000
  /// false: `scale` returns its argument, `step` steps, and nothing else happens.
  bool enabled = true;
  /// The number of overflows after which the scale falls (DeepSpeed: `delayed_shift`). The count starts anew when the scale
  /// grows.
  int64_t hysteresis = 1;
  /// true: a step without an overflow starts the count anew.
  bool consecutive_hysteresis = false;
  /// The scale does not fall below it. If it is above 0, an overflow at this scale is what `at_min_scale` says. DeepSpeed: 1.
  /// At 0 it is an error when the scale would leave fp32's normal numbers, after about 140 overflows.
  double min_scale = 0;
  ScaleRule rule = ScaleRule::kPyTorch;
  AtMinScale at_min_scale = AtMinScale::kError; ///< DeepSpeed: an error with ZeRO, kStay without (stage 0)
  /// The ranks that skip steps together, and have one scale. Unset: those of all meshes that the optimizer's parameters are
  /// sharded over. It is needed where the scaler's optimizers are on different ranks, as one of experts beside one of the rest,
  /// and for a pipeline: the ranks of all stages.
  DeviceMesh mesh;
};

/// Scales the loss, so that gradients in fp16 do not underflow, and skips the steps whose gradients overflowed:
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);             // only where gradients are read or clipped before the step
///   clip_grad_norm_(*model, 1.0);
///   scaler.step(optimizer);
///   scaler.update();
///
/// An infinity or NaN in a gradient of any rank is found by one small all-reduce for each optimizer, so that all ranks
/// skip the step, and have the same scale. Every rank makes the same calls. On gradients in fp32 it changes nothing while the
/// scale is a power of two: they are scaled and unscaled, and steps that overflow are skipped. Semantics: torch.amp.GradScaler,
/// and for what ranks do together FSDP's ShardedGradScaler.
///
/// Errors, on every rank: calls in another order (`unscale_` twice or after `step`, `step` twice, `update` without a step,
/// `unscale_` or `step` where no loss was scaled since the last `update`); gradients that wait for their reduction; an optimizer
/// without any gradient; a complex parameter that takes a gradient, which is named (PyTorch's does not scale its gradient
/// either); an overflow that `min_scale` makes an error, which names the first such parameter of each rank; optimizers on
/// different ranks without `mesh`, at `update` (on the ranks that have both); a scale that is 0 or infinite as a float.
class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// `outputs` times the scale, in the dtype of `outputs`; of a 0-dim one in half precision a Float, as in PyTorch.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);
  /// Divides the gradients of the optimizer's parameters by the scale, in place, and looks for infinities and NaN. `step` does it
  /// where it was not done.
  // NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
  void unscale_(torch::optim::Optimizer& optimizer);
  /// `optimizer.step()`, unless a gradient overflowed. Whether it stepped.
  bool step(torch::optim::Optimizer& optimizer);
  /// The scale of the next step, after the steps of all optimizers; or `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }
  const GradScalerOptions& options() const { return options_; }
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t interval);

 private:
  /// What is known of an optimizer once its gradients are unscaled.
  struct OptimizerState {
    std::vector<int64_t> ranks; // that looked for an overflow together
    bool overflowed = false;
    bool has_stepped = false;
    std::string overflows; // a line for each rank with one, where the scale cannot fall
  };
  using OptimizerStates = std::map<const torch::optim::Optimizer*, OptimizerState>;
  friend class GradScalerBinding;

  bool find_overflow(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& ranks) const;
  static void check_same_ranks(const OptimizerStates& states);
  float fallen() const;                   // the scale after a fall
  std::string reason_not_to_fall() const; // empty where an overflow is no error
  void fall(const OptimizerStates& states);
  void grow();

  GradScalerOptions options_;
  float scale_;             // a float, as PyTorch's: the same numbers after any factors
  int64_t good_steps_ = 0;  // since the scale changed, or an overflow
  int64_t overflows_left_;  // that the scale still stands
  bool has_scaled_ = false; // a loss, since the last update
  OptimizerStates optimizers_;
};

/// The scale and the counters, under `name`, for a checkpoint or `load_state_dict`. The options are not saved: a resumed run may
/// have others. A load with a filter takes all of them or none. The scaler must outlive the state dict.
StateDict state_dict(GradScaler& scaler, const std::string& name = "grad_scaler");

} // namespace tessera
