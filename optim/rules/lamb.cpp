#include <tessera/optim/lamb.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <memory>
#include <utility>

#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using LambEntry = internal::Stepped<LambParamState, LambOptions>;

const LambOptions& checked(const LambOptions& options) {
  internal::check_not_negative("Lamb", "lr", options.lr());
  internal::check_not_negative("Lamb", "eps", options.eps());
  internal::check_not_negative("Lamb", "weight_decay", options.weight_decay());
  internal::check_betas("Lamb", "betas", options.betas());
  TORCH_CHECK(0 <= options.min_coeff() && options.min_coeff() <= options.max_coeff(), "Lamb: min_coeff is ", options.min_coeff(),
              " and max_coeff ", options.max_coeff(), "; they must be a range above 0");
  return options;
}

void register_lamb() {
  [[maybe_unused]] static const bool done = [] {
    register_optimizer<Lamb, LambParamState, LambOptions>(
        "Lamb",
        {{"step", &LambParamState::step}, {"exp_avg", &LambParamState::exp_avg}, {"exp_avg_sq", &LambParamState::exp_avg_sq}},
        {{"lr", &LambOptions::lr},
         {"betas", &LambOptions::betas},
         {"eps", &LambOptions::eps},
         {"weight_decay", &LambOptions::weight_decay},
         {"min_coeff", &LambOptions::min_coeff},
         {"max_coeff", &LambOptions::max_coeff},
         {"bias_correction", &LambOptions::bias_correction}});
    return true;
  }();
}

void update_moments(const LambEntry& entry) {
  auto& state = *entry.state;
  if (!state.exp_avg().defined()) {
    state.exp_avg(at::zeros_like(entry.parameter));
    state.exp_avg_sq(at::zeros_like(entry.parameter));
  }
  const auto [beta1, beta2] = entry.options->betas();
  state.step(state.step() + 1);
  state.exp_avg().lerp_(entry.gradient, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(entry.gradient, entry.gradient, 1 - beta2);
}

/// Adam's direction with the weight decay.
at::Tensor direction(const LambEntry& entry) {
  const auto& [state, options] = std::tie(*entry.state, *entry.options);
  const auto [beta1, beta2] = options.betas();
  const auto steps = static_cast<double>(state.step());
  const double correction1 = options.bias_correction() ? 1 - std::pow(beta1, steps) : 1;
  const double correction2 = options.bias_correction() ? 1 - std::pow(beta2, steps) : 1;
  const auto denominator = state.exp_avg_sq().sqrt().div_(std::sqrt(correction2)).add_(options.eps());
  auto update = state.exp_avg().div(denominator).div_(correction1);
  if (options.weight_decay() != 0) update.add_(entry.parameter, options.weight_decay());
  return update;
}

/// The squared norms of this rank's parts of the parameter and its direction.
at::Tensor own_squares(const LambEntry& entry) {
  const auto square = [](const at::Tensor& tensor) {
    return at::linalg_vector_norm(internal::part_of(tensor), 2, std::nullopt, false, at::kDouble).square();
  };
  return at::stack({square(entry.parameter), square(direction(entry))});
}

/// The trust ratio, a tensor without dims, so that no device is waited for.
at::Tensor trust_ratio(const at::Tensor& squares, const LambOptions& options) {
  const auto weight = squares[0].sqrt(), update = squares[1].sqrt();
  const auto ratio = (weight / update).clamp(options.min_coeff(), options.max_coeff());
  return at::where((weight > 0).logical_and_(update > 0), ratio, at::ones_like(ratio));
}

} // namespace

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LambOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<LambOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const LambOptions&>(group.options()));
  register_lamb();
}

Lamb::Lamb(std::vector<at::Tensor> parameters, const LambOptions& defaults)
    : Lamb({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

// The directions are computed twice, because those of all parameters at once would take the memory of the gradients again.
void Lamb::update() {
  auto entries = internal::stepped_parameters<LambParamState, LambOptions>(*this);
  std::vector<internal::ShareOfSums> shares;
  for (const auto& entry : entries) {
    update_moments(entry);
    shares.push_back({entry.parameter, own_squares(entry)});
  }
  const auto squares = internal::shared_sums(shares, "the norms of Lamb");
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto step = trust_ratio(squares[i], *entries[i].options).mul_(-entries[i].options->lr());
    entries[i].parameter.add_(direction(entries[i]).mul_(step));
  }
}

} // namespace tessera
