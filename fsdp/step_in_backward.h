#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera {

namespace internal {
class BackwardSteps;
class ShardedModule;
} // namespace internal

struct StepInBackwardOptions {
  /// Called with the parameters of a group that are about to be stepped, whose gradients are reduced and in `grad()`. It may
  /// change them in place: adaptive clipping, clipping by value, a look at them. What it communicates all ranks must communicate.
  std::function<void(const std::vector<at::Tensor>&)> before_step = {};
};

/// While it lives, an optimizer steps in the backwards of a model; see `step_in_backward`.
class [[nodiscard]] StepInBackward {
 public:
  StepInBackward(const torch::nn::Module& module, torch::optim::Optimizer& optimizer, StepInBackwardOptions options);
  ~StepInBackward();
  StepInBackward(StepInBackward&&) noexcept;
  StepInBackward& operator=(StepInBackward&&) = delete;
  StepInBackward(const StepInBackward&) = delete;
  StepInBackward& operator=(const StepInBackward&) = delete;

 private:
  std::shared_ptr<internal::BackwardSteps> steps_;
  std::vector<std::weak_ptr<internal::ShardedModule>> modules_;
};

/// Has each backward of `module` step the parameters of `optimizer`: those of a group of `fully_shard` or `replicate` as soon as
/// the group's gradients are reduced, a parameter of no group as soon as its gradient is there. The gradients are freed right
/// after, so that no more than those of two groups exist at once: one gradient a parameter less than a step after the backward
/// needs. The numbers are those of a step after the backward, for each optimizer that updates one parameter at a time. The
/// program calls `loss.backward()` alone; `optimizer.step()` finds nothing to do.
///
///   const auto stepping = tessera::step_in_backward(*model, optimizer);
///   for (const auto& [x, y] : batches) criterion(model->forward(x), y).backward();
///
/// Several optimizers may step parts of one model. A parameter that is in none keeps its gradient. Gradients that `no_sync`, or
/// micro-batches of `micro_batch_scope`, accumulate are stepped in the backward that reduces them, once. Gradients that move to
/// the host (`offload_to_host`, `offload_to_files`), or that come in two ways, are stepped at the end of the backward. Parameters
/// in files are stepped as `tessera::step` does.
///
/// `optimizer` must outlive the handle, and parameters that join it later are not stepped. Local; every rank of the model's
/// meshes makes one, with the same parameters.
///
/// Errors: LBFGS, which computes with all parameters together; an optimizer of a class that `register_optimizer` does not know; a
/// parameter of the optimizer that `module` lacks, that another handle steps, or that has a gradient already. Errors, by the
/// parameter's name, of what needs the gradients of all parameters after the backward: `clip_grad_norm_`, `clip_grad_value_`, a
/// GradScaler that is enabled (train in bf16). An error of `set_is_last_backward(false)`, after which groups would
/// be stepped before other backwards have added their gradients, and of a pipeline's step. Of `no_sync` where a parameter of the
/// optimizer is in no group. A backward that fails may have stepped some groups.
///
/// A step must be the last thing that a backward does with a parameter. Autograd's error ("modified by an inplace operation")
/// ends a backward whose formulas read a parameter once it is stepped: through `detach()`, or in the graph of another forward
/// that ran before the step. So does an error of `recompute`, where a second run reads one; of a group, where the backward of a
/// program's own torch::autograd::Function does; and of a second gradient in one backward, from a backward inside it. Where
/// another group's gradients are reduced first, the step comes late enough, and there is none. (A function that reads a
/// parameter of no group, as in PyTorch, is not seen.)
[[nodiscard]] StepInBackward step_in_backward(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                              StepInBackwardOptions options = {});

} // namespace tessera
