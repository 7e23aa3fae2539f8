#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/optim/one_bit.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <tessera/dtensor/tensor/dtensor_impl.h>
#include <tessera/optim/parts/check_options.h>
#include <tessera/optim/parts/one_bit_reduction.h>
#include <tessera/optim/register_optimizer.h>

namespace tessera {

namespace {

using internal::part_of;
using ZeroOneEntry = internal::OneBitEntry<ZeroOneAdamParamState, ZeroOneAdamOptions>;

const ZeroOneAdamOptions& checked(const ZeroOneAdamOptions& options) {
  internal::check_not_negative("ZeroOneAdam", "lr", options.lr());
  internal::check_not_negative("ZeroOneAdam", "eps", options.eps());
  internal::check_not_negative("ZeroOneAdam", "weight_decay", options.weight_decay());
  internal::check_betas("ZeroOneAdam", "betas", options.betas());
  for (const auto& [name, value] :
       {std::pair("var_update_scaler", options.var_update_scaler()), std::pair("local_step_scaler", options.local_step_scaler()),
        std::pair("local_step_clipper", options.local_step_clipper())})
    TORCH_CHECK(value >= 1, "ZeroOneAdam: ", name, " is ", value, "; it must be at least 1");
  return options;
}

/// Read for a state dict: what the ranks have apart is not saved.
double& synchronized_lr_sum(ZeroOneAdamParamState& state) {
  TORCH_CHECK(state.lr_sum() == 0,
              "ZeroOneAdam: the ranks step apart, and their parameters differ: save, or load, after a step "
              "that reduces (ZeroOneAdam::is_synchronized), or after ZeroOneAdam::synchronize");
  return state.lr_sum();
}

void register_zero_one_adam() {
  [[maybe_unused]] static const bool done = [] {
    using State = ZeroOneAdamParamState;
    using Options = ZeroOneAdamOptions;
    register_optimizer<ZeroOneAdam, State, Options>("ZeroOneAdam",
                                                    {{"step", &State::step},
                                                     {"exp_avg", &State::exp_avg},
                                                     {"exp_avg_sq", &State::exp_avg_sq},
                                                     {"worker_error", &State::worker_error, StateLayout::kByRank},
                                                     {"server_error", &State::server_error, StateLayout::kByRank},
                                                     {"lr_sum", &synchronized_lr_sum},
                                                     {"var_interval", &State::var_interval},
                                                     {"var_counter", &State::var_counter},
                                                     {"local_interval", &State::local_interval},
                                                     {"local_counter", &State::local_counter},
                                                     {"is_frozen", &State::is_frozen}},
                                                    {{"lr", &Options::lr},
                                                     {"betas", &Options::betas},
                                                     {"eps", &Options::eps},
                                                     {"weight_decay", &Options::weight_decay},
                                                     {"var_freeze_step", &Options::var_freeze_step},
                                                     {"var_update_scaler", &Options::var_update_scaler},
                                                     {"local_step_scaler", &Options::local_step_scaler},
                                                     {"local_step_clipper", &Options::local_step_clipper}});
    return true;
  }();
}

/// What a step does with a parameter.
enum class ZeroOneStep {
  kWhole, ///< reduces the whole gradient, and updates the second moment
  kSigns, ///< reduces the gradient in one bit
  kLocal, ///< reduces nothing
  kJoin   ///< reduces, after it, what the ranks have moved
};

ZeroOneStep step_of(const ZeroOneEntry& entry) {
  const auto& state = *entry.state;
  if (state.is_frozen()) return state.step() % state.local_interval() == 0 ? ZeroOneStep::kJoin : ZeroOneStep::kLocal;
  return state.step() % state.var_interval() == 0 ? ZeroOneStep::kWhole : ZeroOneStep::kSigns;
}

void prepare(const ZeroOneEntry& entry) {
  auto& state = *entry.state;
  const auto& [parameter, values, is_mean] = *entry.gradient;
  state.step(state.step() + 1);
  internal::prepare_errors(*entry.gradient, state.worker_error(), state.server_error());
  if (!state.exp_avg().defined()) {
    state.exp_avg(internal::zeros_as(parameter, values.scalar_type()));
    state.exp_avg_sq(internal::zeros_as(parameter, values.scalar_type()));
  }
  if (state.is_frozen() && !state.anchor().defined()) state.anchor(internal::zeros_as(parameter, parameter.scalar_type()));
}

at::Tensor denominator_of(const ZeroOneEntry& entry) {
  return part_of(entry.state->exp_avg_sq()).sqrt().add_(entry.options->eps());
}

/// The step of this rank, with its own gradient or the reduced one.
void take_step(const ZeroOneEntry& entry, ZeroOneStep kind) {
  const auto& options = *entry.options;
  const auto [beta1, beta2] = options.betas();
  auto& state = *entry.state;
  const auto& [parameter, gradient, is_mean] = *entry.gradient;
  const auto average = part_of(state.exp_avg()).mul_(beta1).add_(gradient, 1 - beta1);
  if (kind == ZeroOneStep::kWhole) part_of(state.exp_avg_sq()).mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
  auto update = average.div(denominator_of(entry));
  if (state.is_frozen()) update.masked_fill_(part_of(state.exp_avg_sq()).eq(0), 0);
  if (options.weight_decay() != 0) update.add_(part_of(parameter), options.weight_decay());
  if (state.is_frozen() && state.lr_sum() == 0) part_of(state.anchor()).copy_(part_of(parameter));
  internal::add_to(parameter, update, -options.lr());
  if (state.is_frozen()) state.lr_sum(state.lr_sum() + options.lr());
}

/// Takes the steps back, and gives what is to be reduced in their place. Subtracting them would leave the ranks with other
/// roundings.
internal::OneBitShare take_back(const ZeroOneEntry& entry) {
  auto& state = *entry.state;
  const auto& [parameter, values, is_mean] = *entry.gradient;
  const auto part = part_of(parameter), anchor = part_of(state.anchor());
  const auto moved = part.to(values.scalar_type()).sub(anchor).mul_(denominator_of(entry)).contiguous();
  const auto* meta = internal::dtensor_meta(parameter);
  parameter.copy_(meta ? internal::make_dtensor(anchor, meta->spec) : anchor);
  return internal::share_of(moved, state.worker_error(), state.server_error());
}

void join(const ZeroOneEntry& entry, const at::Tensor& moved) {
  auto& state = *entry.state;
  moved.masked_fill_(part_of(state.exp_avg_sq()).eq(0), 0);
  if (state.lr_sum() > 0) part_of(state.exp_avg()).copy_(moved).div_(-state.lr_sum());
  internal::add_to(entry.gradient->parameter, moved.div(denominator_of(entry)), 1);
  state.lr_sum(0);
}

/// Doubles `interval` after every `scaler` of what it counts.
void count(int64_t& counter, int64_t& interval, int64_t scaler, int64_t most) {
  if (++counter < scaler) return;
  counter = 0;
  interval = std::min(interval * 2, most);
}

void plan_next(const ZeroOneEntry& entry, ZeroOneStep kind) {
  constexpr int64_t kMost = int64_t{1} << 40;
  const auto& options = *entry.options;
  auto& state = *entry.state;
  if (state.is_frozen()) {
    count(state.local_counter(), state.local_interval(), options.local_step_scaler(), options.local_step_clipper());
    return;
  }
  if (kind == ZeroOneStep::kWhole) count(state.var_counter(), state.var_interval(), options.var_update_scaler(), kMost);
  if (state.step() < options.var_freeze_step()) return;
  state.is_frozen(true); // what was left of gradients is no part of what is reduced from here on
  part_of(state.worker_error()).zero_();
  part_of(state.server_error()).zero_();
}

} // namespace

ZeroOneAdam::ZeroOneAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups, const ZeroOneAdamOptions& defaults)
    : ShardedOptimizer(groups, std::make_unique<ZeroOneAdamOptions>(checked(defaults))) {
  for (const auto& group : param_groups()) checked(static_cast<const ZeroOneAdamOptions&>(group.options()));
  register_zero_one_adam();
}

ZeroOneAdam::ZeroOneAdam(std::vector<at::Tensor> parameters, const ZeroOneAdamOptions& defaults)
    : ZeroOneAdam({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

bool ZeroOneAdam::is_synchronized() const {
  return std::all_of(state().begin(), state().end(),
                     [](const auto& each) { return static_cast<const ZeroOneAdamParamState&>(*each.second).lr_sum() == 0; });
}

void ZeroOneAdam::synchronize() {
  constexpr auto* kName = "ZeroOneAdam::synchronize";
  const at::NoGradGuard no_grad;
  auto apart = internal::zeros_in_place_of_gradients(*this, kName, [&](const at::Tensor& parameter) {
    const auto found = state().find(parameter.unsafeGetTensorImpl());
    return found != state().end() && static_cast<const ZeroOneAdamParamState&>(*found->second).lr_sum() != 0;
  });
  const auto entries = internal::one_bit_entries<ZeroOneAdamParamState, ZeroOneAdamOptions>(*this, apart);
  std::vector<internal::OneBitShare> moves;
  moves.reserve(entries.size());
  for (const auto& entry : entries) moves.push_back(take_back(entry));
  if (apart.ranks) internal::one_bit_mean(moves, *apart.ranks, kName);
  for (size_t i = 0; i < entries.size(); ++i) join(entries[i], moves[i].values);
}

void ZeroOneAdam::update() {
  constexpr auto* kName = "ZeroOneAdam";
  auto gradients = internal::own_gradients(*this, kName);
  const auto entries = internal::one_bit_entries<ZeroOneAdamParamState, ZeroOneAdamOptions>(*this, gradients);
  std::vector<ZeroOneStep> kinds;
  std::vector<size_t> whole;
  std::vector<internal::OneBitShare> signs, moves;
  for (size_t i = 0; i < entries.size(); ++i) {
    prepare(entries[i]);
    kinds.push_back(step_of(entries[i]));
    auto& state = *entries[i].state;
    if (kinds[i] == ZeroOneStep::kWhole) whole.push_back(i);
    if (kinds[i] == ZeroOneStep::kSigns)
      signs.push_back(internal::share_of(gradients.all[i].values, state.worker_error(), state.server_error()));
  }
  internal::average(gradients, whole, kName);
  if (gradients.ranks) internal::one_bit_mean(signs, *gradients.ranks, kName);
  for (size_t i = 0; i < entries.size(); ++i) {
    take_step(entries[i], kinds[i]);
    if (kinds[i] == ZeroOneStep::kJoin) moves.push_back(take_back(entries[i]));
  }
  if (gradients.ranks) internal::one_bit_mean(moves, *gradients.ranks, kName);
  size_t next = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (kinds[i] == ZeroOneStep::kJoin) join(entries[i], moves[next++].values);
    plan_next(entries[i], kinds[i]);
  }
}

} // namespace tessera
