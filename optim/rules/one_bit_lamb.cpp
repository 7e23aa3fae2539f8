#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>
#include <tessera/optim/one_bit.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/one_bit_reduction.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using internal::part_of;
using OneBitLambEntry = internal::OneBitEntry<OneBitLambParamState, OneBitLambOptions>;

const OneBitLambOptions& checked(const OneBitLambOptions& options) {
  internal::check_not_negative("OneBitLamb", "lr", options.lr());
  internal::check_not_negative("OneBitLamb", "eps", options.eps());
  internal::check_not_negative("OneBitLamb", "weight_decay", options.weight_decay());
  internal::check_not_negative("OneBitLamb", "freeze_step", static_cast<double>(options.freeze_step()));
  internal::check_betas("OneBitLamb", "betas", options.betas());
  internal::check_betas("OneBitLamb", "coeff_beta and factor_threshold", {options.coeff_beta(), options.factor_threshold()});
  TORCH_CHECK(options.min_coeff() <= options.max_coeff(), "OneBitLamb: min_coeff is ", options.min_coeff(), " and max_coeff ",
              options.max_coeff());
  TORCH_CHECK(options.factor_min() <= options.factor_max(), "OneBitLamb: factor_min is ", options.factor_min(),
              " and factor_max ", options.factor_max());
  return options;
}

void register_one_bit_lamb() {
  [[maybe_unused]] static const bool done = [] {
    using State = OneBitLambParamState;
    using Options = OneBitLambOptions;
    register_optimizer<OneBitLamb, State, Options>("OneBitLamb",
                                                   {{"step", &State::step},
                                                    {"exp_avg", &State::exp_avg},
                                                    {"exp_avg_sq", &State::exp_avg_sq},
                                                    {"exp_avg_sq_fresh", &State::exp_avg_sq_fresh},
                                                    {"worker_error", &State::worker_error, StateLayout::kByRank},
                                                    {"server_error", &State::server_error, StateLayout::kByRank},
                                                    {"frozen_coeff", &State::frozen_coeff},
                                                    {"last_factor", &State::last_factor}},
                                                   {{"lr", &Options::lr},
                                                    {"betas", &Options::betas},
                                                    {"eps", &Options::eps},
                                                    {"weight_decay", &Options::weight_decay},
                                                    {"freeze_step", &Options::freeze_step},
                                                    {"max_coeff", &Options::max_coeff},
                                                    {"min_coeff", &Options::min_coeff},
                                                    {"coeff_beta", &Options::coeff_beta},
                                                    {"factor_max", &Options::factor_max},
                                                    {"factor_min", &Options::factor_min},
                                                    {"factor_threshold", &Options::factor_threshold}});
    return true;
  }();
}

/// The second moment that goes on after the warm-up begins as the one that stays.
void prepare(const OneBitLambEntry& entry) {
  internal::begin_step(entry);
  auto& state = *entry.state;
  if (!is_frozen(entry) || state.exp_avg_sq_fresh().defined()) return;
  state.exp_avg_sq_fresh(internal::zeros_as(entry.gradient->parameter, entry.gradient->values.scalar_type()));
  part_of(state.exp_avg_sq_fresh()).copy_(part_of(state.exp_avg_sq()));
}

double norm_of(const at::Tensor& values) {
  return at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
}

void warm_up(const OneBitLambEntry& entry) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  auto& state = *entry.state;
  const auto& [parameter, gradient, is_mean] = *entry.gradient;
  const auto average = part_of(state.exp_avg()).mul_(beta1).add_(gradient, 1 - beta1);
  const auto square = part_of(state.exp_avg_sq()).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  auto update = average.div(square.sqrt().add_(options.eps()));
  if (options.weight_decay() != 0) update.add_(part_of(parameter), options.weight_decay());
  const double weight_norm = norm_of(part_of(parameter)), update_norm = norm_of(update);
  double coeff = 1;
  if (weight_norm > 0 && update_norm > 0) coeff = std::clamp(weight_norm / update_norm, options.min_coeff(), options.max_coeff());
  if (coeff != 1) state.frozen_coeff(options.coeff_beta() * state.frozen_coeff() + (1 - options.coeff_beta()) * coeff);
  internal::add_to(parameter, update, -options.lr() * coeff);
}

/// Says by how much the frozen direction is too long, within its bounds.
double factor_of(const OneBitLambEntry& entry, const at::Tensor& direction, const at::Tensor& update,
                 const at::Tensor& denominator) {
  const auto& options = *entry.options;
  auto& state = *entry.state;
  if (denominator.numel() == 0) return 1;
  const auto fresh = part_of(state.exp_avg_sq_fresh()).sqrt().add_(options.eps());
  auto factor = denominator.div(fresh).max().item<double>();
  if (options.weight_decay() != 0) {
    const double length = norm_of(update), ratio = length > 0 ? std::min(1.0, norm_of(direction) / length) : 1;
    factor = factor * ratio + (1 - ratio);
  }
  factor = std::clamp(factor, options.factor_min(), options.factor_max());
  const double last = state.last_factor(), change = options.factor_threshold();
  factor = std::clamp(factor, last * (1 - change), last * (1 + change));
  state.last_factor(factor);
  return factor;
}

/// Steps after the reduction of the momentum, which was `before`.
void step_frozen(const OneBitLambEntry& entry, const at::Tensor& before) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  auto& state = *entry.state;
  const auto& parameter = entry.gradient->parameter;
  const auto average = part_of(state.exp_avg()), square = part_of(state.exp_avg_sq());
  average.masked_fill_(square.eq(0), 0);
  const auto gradient = average.sub(before, beta1).div_(1 - beta1);
  part_of(state.exp_avg_sq_fresh()).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  const auto denominator = square.sqrt().add_(options.eps()), direction = average.div(denominator);
  const auto update = options.weight_decay() != 0 ? direction.add(part_of(parameter), options.weight_decay()) : direction;
  internal::add_to(parameter, update, -options.lr() * state.frozen_coeff() * factor_of(entry, direction, update, denominator));
}

} // namespace

OneBitLamb::OneBitLamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const OneBitLambOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<OneBitLambOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const OneBitLambOptions&>(group.options()));
  register_one_bit_lamb();
}

OneBitLamb::OneBitLamb(std::vector<at::Tensor> parameters, const OneBitLambOptions& defaults)
    : OneBitLamb({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

void OneBitLamb::update() {
  constexpr auto* kName = "OneBitLamb";
  auto gradients = internal::own_gradients(*this, kName);
  const auto entries = internal::one_bit_entries<OneBitLambParamState, OneBitLambOptions>(*this, gradients);
  std::vector<size_t> warming_up;
  std::vector<at::Tensor> before(entries.size());
  std::vector<internal::OneBitShare> shares;
  for (size_t i = 0; i < entries.size(); ++i) {
    prepare(entries[i]);
    auto& state = *entries[i].state;
    if (!is_frozen(entries[i])) {
      warming_up.push_back(i);
      continue;
    }
    const auto average = part_of(state.exp_avg());
    const double beta1 = std::get<0>(entries[i].options->betas());
    before[i] = average.clone();
    average.mul_(beta1).add_(gradients.all[i].values, 1 - beta1);
    shares.push_back(internal::share_of(average, state.worker_error(), state.server_error()));
  }
  internal::average(gradients, warming_up, kName);
  for (const auto i : warming_up) warm_up(entries[i]);
  if (gradients.ranks) internal::one_bit_mean(shares, *gradients.ranks, kName);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (before[i].defined()) step_frozen(entries[i], before[i]);
  }
}

} // namespace tessera
