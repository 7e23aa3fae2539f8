#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/checkpoint/state_dict.h>
#include <tessera/dtensor/spec.h>

namespace torch::nn {
class Module;
}

namespace tessera {

/// How far an average moves towards the model's weights, in [0, 1]: average += share * (weights - average). It is asked once an
/// update, with the number of updates before it, which is at least 1, and must be the same on every rank.
using AverageShare = std::function<double(int64_t n_averaged)>;

/// All updates have the same weight, 1 / (n_averaged + 1): stochastic weight averaging (PyTorch: get_swa_multi_avg_fn).
AverageShare swa();

/// A decay that begins small and grows: 1 - (1 + n_averaged / inv_gamma)^-power. So an average forgets its first weights sooner.
struct EmaWarmup {
  double inv_gamma = 1;
  double power = 2.0 / 3;
};

/// The exponential moving average, 1 - decay (PyTorch: get_ema_multi_avg_fn). With a warm-up, the smaller of the two decays
/// is used. An error if `decay` is outside [0, 1], or a number of the warm-up is not positive.
AverageShare ema(double decay = 0.999, const std::optional<EmaWarmup>& warmup = std::nullopt);

struct AverageOptions {
  /// Average the buffers too. Without it the average has none, and an evaluation uses the model's.
  bool use_buffers = false;
  /// Leave out parameters that do not require grad when the average is made, as under LoRA. They must stay frozen.
  bool ignore_frozen_params = false;
  /// The dtype of the average of floating-point tensors; unset: the tensor's own. Use float for bfloat16 weights: an average in
  /// bfloat16 does not change, because small updates are rounded away.
  std::optional<at::ScalarType> dtype;
  /// Begins the names in the state dict. Two averages of one model need two names.
  std::string name = "average";
};

/// A running average of a model's weights (PyTorch: torch.optim.swa_utils.AveragedModel).
///
/// The average of a sharded parameter is sharded like it: each rank averages its own part, and nothing is gathered. The average
/// of a tied parameter is one. Integers and booleans are not averaged; the newest value counts. Make it after `fully_shard` (and
/// after `materialize`). It keeps no reference to the model. Used by one thread at a time. All calls are local, and each rank
/// must make the same.
class AveragedModel {
 public:
  /// Begins with a copy of `model`'s weights, which the first update replaces. An error for parameters on the meta device.
  explicit AveragedModel(const torch::nn::Module& model, AverageShare share = swa(), AverageOptions options = {});
  AveragedModel(const AveragedModel&) = delete;
  AveragedModel& operator=(const AveragedModel&) = delete;

  /// Updates the average with the weights of `model`: the first time it copies them, then it applies the share. Call it after
  /// `optimizer.step()`. An error, without a change, if names, shapes, dtypes or layouts differ from those of the model that the
  /// average was made from, if an AveragedWeights of any average is open on `model`, or if a share is outside [0, 1].
  void update_parameters(const torch::nn::Module& model);
  /// Updates so far.
  int64_t n_averaged() const { return *n_averaged_; }

  /// Overwrites the weights of `model` with the average. Errors as for `update_parameters`.
  void copy_to(const torch::nn::Module& model) const;

 private:
  friend class AveragedWeights;
  friend StateDict state_dict(const AveragedModel& average, const StateDictOptions& options);
  struct Item {
    std::string name; ///< in the model
    std::vector<std::string> aliases;
    at::Tensor average;
    at::ScalarType dtype; ///< of the model's tensor
    SpecPtr spec;         ///< of the model's tensor, null for a plain one
  };
  /// The tensors of `model` in the order of `items_`.
  std::vector<at::Tensor> tensors_of(const torch::nn::Module& model, const char* what) const;

  AverageShare share_;
  AverageOptions options_;
  std::vector<Item> items_;
  std::shared_ptr<int64_t> n_averaged_ = std::make_shared<int64_t>(0); ///< state dicts write it too
};

/// While it lives, `model` holds the average instead of its own weights: for an evaluation, or an export. Afterwards the model
/// has its own weights again, bit for bit. Everything that was written to the model in between is lost; the average does not
/// change. It needs memory for one more copy of this rank's part. Do not open it between a forward and its backward: as after any
/// write to the weights, the backward would be an error. Several scopes of one model may be open, of one average or of several,
/// and end in any order. The newest one decides what the model holds; after the last one has ended, the model has its own
/// weights.
///
/// Local; each rank makes and ends it at the same point of the program. Errors as for `AveragedModel::copy_to`.
class AveragedWeights {
 public:
  AveragedWeights(const AveragedModel& average, const torch::nn::Module& model);
  /// Loses the error of `restore`.
  ~AveragedWeights();
  AveragedWeights(const AveragedWeights&) = delete;
  AveragedWeights& operator=(const AveragedWeights&) = delete;

  /// Gives the model its own weights back now.
  void restore();

 private:
  friend class AveragedModel;
  /// Whether a scope that is open has one of `tensors`.
  static bool hold_any(const std::vector<at::Tensor>& tensors);
  /// Takes this scope from those that are open. What it kept of tensors that a later one has goes to that one.
  void close();

  std::vector<at::Tensor> tensors_, kept_; ///< the model's, and copies of what they held
};

/// The average under "average.<parameter or buffer>", with the value "average.n_averaged", to be merged with the model's state
/// and saved and loaded with it, on any number of ranks. Of the options `full_state_dict`, `cpu_offload`, `rank0_only` and
/// `prefix` count, as for a module; the prefix stands before the name of a parameter. How the average weighs is not saved. The
/// tensors are the average's own.
StateDict state_dict(const AveragedModel& average, const StateDictOptions& options = {});

} // namespace tessera
