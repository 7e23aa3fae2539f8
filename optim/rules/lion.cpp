#include <tessera/optim/lion.h>

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/stepped.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

const LionOptions& checked(const LionOptions& options) {
  internal::check_not_negative("Lion", "lr", options.lr());
  internal::check_not_negative("Lion", "weight_decay", options.weight_decay());
  internal::check_betas("Lion", "betas", options.betas());
  return options;
}

void register_lion() {
  [[maybe_unused]] static const bool done = [] {
    register_optimizer<Lion, LionParamState, LionOptions>(
        "Lion", {{"exp_avg", &LionParamState::exp_avg}},
        {{"lr", &LionOptions::lr}, {"betas", &LionOptions::betas}, {"weight_decay", &LionOptions::weight_decay}});
    return true;
  }();
}

} // namespace

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LionOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<LionOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const LionOptions&>(group.options()));
  register_lion();
}

Lion::Lion(std::vector<at::Tensor> parameters, const LionOptions& defaults)
    : Lion({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

void Lion::update() {
  for (auto& [parameter, gradient, state, options] : internal::stepped_parameters<LionParamState, LionOptions>(*this)) {
    auto& exp_avg = state->exp_avg();
    if (!exp_avg.defined()) exp_avg = at::zeros_like(parameter);
    const auto [beta1, beta2] = options->betas();
    if (options->weight_decay() != 0) parameter.mul_(1 - options->lr() * options->weight_decay());
    parameter.add_(exp_avg.lerp(gradient, 1 - beta1).sign_(), -options->lr());
    exp_avg.lerp_(gradient, 1 - beta2);
  }
}

} // namespace tessera
