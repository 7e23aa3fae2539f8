#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <tessera/optim/one_bit.h>

#include <memory>
#include <utility>

#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/one_bit_reduction.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using OneBitAdamEntry = internal::OneBitEntry<OneBitAdamParamState, OneBitAdamOptions>;

const OneBitAdamOptions& checked(const OneBitAdamOptions& options) {
  internal::check_not_negative("OneBitAdam", "lr", options.lr());
  internal::check_not_negative("OneBitAdam", "eps", options.eps());
  internal::check_not_negative("OneBitAdam", "weight_decay", options.weight_decay());
  internal::check_not_negative("OneBitAdam", "freeze_step", static_cast<double>(options.freeze_step()));
  internal::check_betas("OneBitAdam", "betas", options.betas());
  return options;
}

void register_one_bit_adam() {
  [[maybe_unused]] static const bool done = [] {
    using State = OneBitAdamParamState;
    using Options = OneBitAdamOptions;
    register_optimizer<OneBitAdam, State, Options>("OneBitAdam",
                                                   {{"step", &State::step},
                                                    {"exp_avg", &State::exp_avg},
                                                    {"exp_avg_sq", &State::exp_avg_sq},
                                                    {"worker_error", &State::worker_error, StateLayout::kByRank},
                                                    {"server_error", &State::server_error, StateLayout::kByRank}},
                                                   {{"lr", &Options::lr},
                                                    {"betas", &Options::betas},
                                                    {"eps", &Options::eps},
                                                    {"weight_decay", &Options::weight_decay},
                                                    {"freeze_step", &Options::freeze_step}});
    return true;
  }();
}

/// The moments with this step's gradient, the rank's own after the warm-up.
void update_moments(const OneBitAdamEntry& entry) {
  const auto [beta1, beta2] = entry.options->betas();
  const auto& gradient = entry.gradient->values;
  internal::part_of(entry.state->exp_avg()).mul_(beta1).add_(gradient, 1 - beta1);
  if (!is_frozen(entry)) internal::part_of(entry.state->exp_avg_sq()).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
}

void apply(const OneBitAdamEntry& entry) {
  const auto average = internal::part_of(entry.state->exp_avg()), square = internal::part_of(entry.state->exp_avg_sq());
  if (is_frozen(entry)) average.masked_fill_(square.eq(0), 0);
  auto update = average.div(square.sqrt().add_(entry.options->eps()));
  const auto& parameter = entry.gradient->parameter;
  if (entry.options->weight_decay() != 0) update.add_(internal::part_of(parameter), entry.options->weight_decay());
  internal::add_to(parameter, update, -entry.options->lr());
}

} // namespace

OneBitAdam::OneBitAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups, const OneBitAdamOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<OneBitAdamOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const OneBitAdamOptions&>(group.options()));
  register_one_bit_adam();
}

OneBitAdam::OneBitAdam(std::vector<at::Tensor> parameters, const OneBitAdamOptions& defaults)
    : OneBitAdam({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

void OneBitAdam::update() {
  constexpr auto* kName = "OneBitAdam";
  auto gradients = internal::own_gradients(*this, kName);
  const auto entries = internal::one_bit_entries<OneBitAdamParamState, OneBitAdamOptions>(*this, gradients);
  std::vector<size_t> warming_up;
  std::vector<internal::OneBitShare> shares;
  for (size_t i = 0; i < entries.size(); ++i) {
    internal::begin_step(entries[i]);
    auto& state = *entries[i].state;
    if (!is_frozen(entries[i])) {
      warming_up.push_back(i);
    } else {
      shares.push_back(internal::share_of(internal::part_of(state.exp_avg()), state.worker_error(), state.server_error()));
    }
  }
  internal::average(gradients, warming_up, kName);
  for (const auto& entry : entries) update_moments(entry);
  if (gradients.ranks) internal::one_bit_mean(shares, *gradients.ranks, kName);
  for (const auto& entry : entries) apply(entry);
}

} // namespace tessera
