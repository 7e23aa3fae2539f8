// Hooks that run when a gradient has been added to grad().
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>

namespace tessera::testing::scripts {
namespace {

/// Halves the gradient, in place or not, or drops it.
class ActsOnGradient final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ActsOnGradient(int64_t kind) : kind_(kind) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    const torch::NoGradGuard no_grad;
    if (kind_ == 0) parameter.mutable_grad().mul_(0.5);
    if (kind_ == 1) parameter.mutable_grad() = Tensor();
    if (kind_ == 2) parameter.mutable_grad() = parameter.grad() * 0.5;
  }

 private:
  int64_t kind_;
};

/// One backward, after which the hooks go. Of gradients that come in several backwards they would see one after another, or all.
void backward_with_post_hooks(Turn& turn) {
  if (turn.trainee.model->has_inner_backward()) return;
  const auto kind = turn.draw.below(3);
  std::vector<Tensor> hooked;
  for (const auto& parameter : distinct(turn.trainee.model->parameters())) {
    const bool chosen = turn.draw.chance(60);
    if (!chosen || !parameter.requires_grad()) continue;
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<ActsOnGradient>(kind));
    hooked.push_back(parameter);
  }
  const auto remove = c10::make_scope_exit([&] {
    for (const auto& parameter : hooked) torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  });
  turn.note(c10::str(hooked.size(), " hooks of kind ", kind));
  const auto loss = random_loss(turn, {}, /*may_recompute=*/true, /*may_mix_dtensors=*/false);
  turn.side.record_mean(loss);
  backward(loss);
}

} // namespace

std::vector<Action> post_hook_actions() { return {{"backward with post hooks", 4, When::kReduced, backward_with_post_hooks}}; }

} // namespace tessera::testing::scripts
