// What programs do with gradients: clipping, edits, hooks, and which parameters have any.
#include <c10/util/ScopeExit.h>
#include <tessera/fsdp/clip_grad.h>
#include <tessera/optim/adaptive_clip.h>
#include <tessera/optim/grad_norm.h>

#include <array>
#include <limits>
#include <utility>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/random_optimizer.h>

namespace tessera::testing::scripts {
namespace {

void zero(Turn& turn) {
  const bool to_none = turn.draw.chance(50);
  if (turn.draw.chance(50)) {
    turn.trainee.model->zero_grad(to_none);
  } else {
    turn.trainee.optimizer->zero_grad(to_none);
  }
}

void clip(Turn& turn) {
  std::vector<Tensor> parameters; // LibTorch's own refuses the extremum of no elements, and counts a tied one twice
  for (const auto& parameter : distinct(turn.trainee.model->parameters())) {
    if (parameter.scalar_type() == torch::kDouble && parameter.numel() > 0 && parameter.grad().defined())
      parameters.push_back(parameter);
  }
  if (parameters.empty()) return;
  const bool lie_alike = lie_on_one_mesh(parameters);
  const auto clip_norm = [&](double limit, double power) { // LibTorch's own knows one device and one mesh
    const auto norm = lie_alike ? torch::nn::utils::clip_grad_norm_(parameters, limit, power)
                                : clip_grad_norm_(parameters, limit, power).item<double>();
    turn.side.recorded.push_back({norm, false});
  };
  switch (turn.draw.below(5)) {
    case 4: return clip_grad_adaptive_(parameters, 0.1);
    case 0: return clip_norm(0.5, 2);
    case 1: return clip_norm(0.3, 1);
    case 2: return clip_norm(0.3, std::numeric_limits<double>::infinity());
    default: torch::nn::utils::clip_grad_value_(parameters, 0.05);
  }
}

/// In two steps, and by the number of tensors that are not zero.
void clip_by_known_norm(Turn& turn, const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  const auto norm = get_total_norm(gradients, 2.0, /*error_if_nonfinite=*/true);
  turn.side.recorded.push_back({norm.item<double>(), false});
  turn.side.recorded.push_back({get_total_norm(gradients, 0).item<double>(), false});
  clip_grads_with_norm_(parameters, 0.6, norm);
}

void clip_the_module(Turn& turn) {
  const auto modules = turn.trainee.model->modules();
  const auto& module = turn.draw.chance(60) ? *modules.front() : *turn.draw.of(modules);
  const auto kind = turn.draw.below(6);
  if (turn.trainee.ignores) return; // it leaves them out
  bool any = false;
  for (const auto& parameter : module.parameters()) {
    if (parameter.scalar_type() != torch::kDouble) return; // too coarse to compare, or not clipped by LibTorch
    any = any || parameter.grad().defined();
  }
  if (!any) return;
  turn.note(c10::str("of ", module.name(), ", kind ", kind));
  if (kind == 5) return clip_grad_value_(module, 0.05);
  if (kind == 4) return clip_by_known_norm(turn, distinct(module.parameters()));
  const std::array<double, 4> powers{2, 1, std::numeric_limits<double>::infinity(), 3};
  turn.side.recorded.push_back({clip_grad_norm_(module, 0.4, powers[static_cast<size_t>(kind)]).item<double>(), false});
}

void edit_gradient(Turn& turn) {
  const torch::NoGradGuard no_grad;
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  auto parameter = item.value();
  const auto kind = turn.draw.below(5);
  const auto values = random_values(parameter, turn.draw);
  if (!parameter.requires_grad() || !parameter.grad().defined()) return;
  turn.note(c10::str(item.key(), ": edit ", kind));
  switch (kind) {
    case 0: parameter.mutable_grad().mul_(0.5); break;
    case 1: parameter.mutable_grad() = Tensor(); break;
    case 2: parameter.mutable_grad().add_(laid_out_as(values, parameter)); break;
    case 3: parameter.mutable_grad() = laid_out_as(values, parameter); break;
    default: parameter.mutable_grad() = parameter.grad().clone() * 0.5;
  }
}

void freeze(Turn& turn) {
  const auto items = turn.trainee.model->named_parameters().items();
  const int64_t count = 1 + turn.draw.below(3);
  for (int64_t i = 0; i < count; ++i) {
    const auto& item = turn.draw.of(items);
    const bool trains = turn.draw.chance(60);
    // A gradient in bfloat16 would be too coarse to compare.
    if (item.value().scalar_type() == torch::kBFloat16) continue;
    turn.note(c10::str(trains ? "unfreezes " : "freezes ", item.key()));
    item.value().requires_grad_(trains);
  }
}

void add_hook(Turn& turn) {
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  const bool halves = turn.draw.chance(50);
  if (!item.value().requires_grad()) return;
  turn.note("hook on " + item.key());
  const auto hook = [halves](const Tensor& gradient) { return halves ? gradient * 0.5 : gradient.mul(1.5).clone(); };
  turn.trainee.hooks.emplace_back(item.value(), item.value().register_hook(hook));
}

/// A hook of a parameter runs a backward of its own, of this model or the other.
void backward_in_a_hook(Turn& turn) {
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  const bool on_other = turn.draw.chance(50), halves = turn.draw.chance(50);
  const auto seed = turn.draw.seed();
  if (!item.value().requires_grad()) return;
  turn.note(c10::str("hook on ", item.key(), " with a backward of ", on_other ? "the other model" : "this model"));
  bool has_run = false;
  const auto hook = item.value().register_hook([&](const Tensor& gradient) {
    if (!std::exchange(has_run, true)) {
      const torch::AutoGradMode grad_mode(true);
      backward(whole_loss(turn.side, on_other ? turn.other : turn.trainee, seed));
    }
    return halves ? gradient * 0.5 : gradient;
  });
  const auto remove = c10::make_scope_exit([&] { item.value().remove_hook(hook); }); // after an error as well
  const auto loss = random_loss(turn);
  turn.side.record_mean(loss);
  backward(loss);
}

void remove_hooks(Turn& turn) {
  for (auto& [parameter, hook] : turn.trainee.hooks) parameter.remove_hook(hook);
  turn.trainee.hooks.clear();
}

} // namespace

std::vector<Action> gradient_actions() {
  return {{"zero_grad", 6, When::kReduced, zero},
          {"clip", 8, When::kReduced, clip},
          {"clip the module", 5, When::kReduced, clip_the_module},
          {"backward in a hook", 4, When::kReduced, backward_in_a_hook},
          {"edit a gradient", 6, When::kReduced, edit_gradient},
          {"freeze", 5, When::kReduced, freeze},
          {"add a hook", 4, When::kReduced, add_hook},
          {"remove hooks", 3, When::kReduced, remove_hooks}};
}

} // namespace tessera::testing::scripts
