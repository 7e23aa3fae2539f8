#include <tessera/optim/fused.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/optim/kernels/rounded_adam.h>
#include <tessera/optim/parts/fused_lists.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>

namespace tessera {

namespace {

using internal::FusedEntry;
using torch::optim::Optimizer;

at::Tensor loss_of(const Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode with_grad(true);
  return closure();
}

template <typename State, typename Options>
using Group = std::vector<internal::Stepped<State, Options>>;

/// Calls `step` with the parameters of each group that have a gradient, where there are some.
template <typename State, typename Options, typename Step>
void for_each_group(Optimizer& optimizer, const Step& step) {
  auto all = internal::stepped_parameters<State, Options>(optimizer);
  for (auto first = all.begin(); first != all.end();) {
    const auto same = [&](const auto& other) { return other.options == first->options; };
    const auto end = std::find_if_not(first, all.end(), same);
    step(Group<State, Options>(first, end));
    first = end;
  }
}

/// What a step of Adam or AdamW, whose classes are two of one form, keeps moments in.
struct MomentStorage {
  MomentDtype dtype;
  uint64_t seed;
  bool are_rounded() const { return dtype == MomentDtype::kBFloat16; }
};

/// A moment before a step: zeros at first. An error for one in bf16 of a parameter that is not, where none are rounded.
void prepare(at::Tensor& moment, const at::Tensor& parameter, const MomentStorage& moments) {
  const auto dtype = moments.are_rounded() ? at::kBFloat16 : parameter.scalar_type();
  if (!moment.defined()) moment = internal::zeros_as(parameter, dtype);
  if (moment.scalar_type() == dtype) return;
  TORCH_CHECK(moments.are_rounded(), "the step of an optimizer: a moment of a parameter of shape ", parameter.sizes(), " is ",
              moment.scalar_type(), ": call keep_moments_in(MomentDtype::kBFloat16) before the step");
  const auto before = moment;
  moment = internal::zeros_as(parameter, dtype);
  moment.copy_(before);
}

template <typename State>
internal::FusedAdamSettings settings_of(const State& options, bool decoupled) {
  const auto [beta1, beta2] = options.betas();
  return {.lr = options.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .eps = options.eps(),
          .weight_decay = options.weight_decay(),
          .amsgrad = options.amsgrad(),
          .decoupled = decoupled};
}

/// Steps a parameter whose moments are in bf16.
void step_rounded(const FusedEntry& entry, const internal::FusedAdamSettings& settings, uint64_t seed) {
  const auto part = internal::part_of(entry.tensors[0]);
  TORCH_CHECK(!settings.amsgrad, "FusedAdam: amsgrad with moments in bf16 is not here: its largest moments would only grow");
  TORCH_CHECK(part.is_cpu() && part.is_floating_point(),
              "FusedAdam: moments in bf16 are of floating-point parameters on the CPU; one of shape ", part.sizes(), " is ",
              part.scalar_type(), " on ", part.device());
  const auto values = part.contiguous();
  const internal::RoundedAdamMemory memory{values, internal::part_of(entry.tensors[1]).contiguous(),
                                           internal::part_of(entry.tensors[2]), internal::part_of(entry.tensors[3])};
  internal::announce_write(entry.tensors[0]);
  internal::rounded_adam_step(entry.tensors[0], memory, settings, entry.step, seed);
  if (!values.is_same(part)) part.copy_(values);
}

template <typename State, typename Options>
void step_adam(Optimizer& optimizer, bool decoupled, const MomentStorage& moments) {
  for_each_group<State, Options>(optimizer, [&](const Group<State, Options>& group) {
    const auto& options = *group[0].options;
    std::vector<FusedEntry> entries;
    for (const auto& [parameter, gradient, state, same] : group) {
      prepare(state->exp_avg(), parameter, moments);
      prepare(state->exp_avg_sq(), parameter, moments);
      if (options.amsgrad() && !state->max_exp_avg_sq().defined()) state->max_exp_avg_sq(at::zeros_like(parameter));
      state->step(state->step() + 1);
      entries.push_back({{parameter, gradient, state->exp_avg(), state->exp_avg_sq()}, state->step()});
      if (options.amsgrad()) entries.back().tensors.push_back(state->max_exp_avg_sq());
    }
    const auto settings = settings_of(options, decoupled);
    if (!moments.are_rounded()) return internal::fused_adam_step(entries, settings);
    for (const auto& entry : entries) step_rounded(entry, settings, moments.seed);
  });
}

/// The first step of a parameter writes its momentum, the others read it.
void step_sgd(const std::vector<FusedEntry>& entries, const torch::optim::SGDOptions& options, bool is_first) {
  internal::for_each_fused_list(entries, [&](internal::FusedLists& lists) {
    const auto momenta = lists.tensors.size() > 2 ? lists.tensors[2] : std::vector<at::Tensor>();
    at::_fused_sgd_(lists.tensors[0], lists.tensors[1], momenta, options.weight_decay(), options.momentum(), options.lr(),
                    options.dampening(), options.nesterov(), false, is_first);
  });
}

} // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  auto loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  step_adam<torch::optim::AdamParamState, torch::optim::AdamOptions>(*this, false, {moments_, seed_});
  return loss;
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  auto loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  step_adam<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(*this, true, {moments_, seed_});
  return loss;
}

void FusedAdam::keep_moments_in(MomentDtype dtype, uint64_t seed) {
  moments_ = dtype;
  seed_ = seed;
}

void FusedAdamW::keep_moments_in(MomentDtype dtype, uint64_t seed) {
  moments_ = dtype;
  seed_ = seed;
}

at::Tensor FusedSGD::step(LossClosure closure) {
  auto loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  for_each_group<torch::optim::SGDParamState, torch::optim::SGDOptions>(*this, [](const auto& group) {
    const auto& options = *group[0].options;
    std::vector<FusedEntry> first, later;
    for (const auto& [parameter, gradient, state, same] : group) {
      FusedEntry entry{{parameter, gradient}};
      const bool is_first = options.momentum() != 0 && !state->momentum_buffer().defined();
      if (is_first) state->momentum_buffer(at::empty_like(parameter));
      if (options.momentum() != 0) entry.tensors.push_back(state->momentum_buffer());
      (is_first ? first : later).push_back(std::move(entry));
    }
    step_sgd(first, options, true);
    step_sgd(later, options, false);
  });
  return loss;
}

at::Tensor FusedAdagrad::step(LossClosure closure) {
  auto loss = loss_of(closure);
  const at::NoGradGuard no_grad;
  for_each_group<torch::optim::AdagradParamState, torch::optim::AdagradOptions>(*this, [](const auto& group) {
    const auto& options = *group[0].options;
    std::vector<FusedEntry> entries;
    for (const auto& [parameter, gradient, state, same] : group) {
      if (!state->sum().defined()) state->sum(at::full_like(parameter, options.initial_accumulator_value()));
      state->step(state->step() + 1);
      entries.push_back({{parameter, gradient, state->sum()}, state->step()});
    }
    internal::for_each_fused_list(entries, [&](internal::FusedLists& lists) {
      at::_fused_adagrad_(lists.tensors[0], lists.tensors[1], lists.tensors[2], lists.steps, options.lr(), options.lr_decay(),
                          options.weight_decay(), options.eps(), false);
    });
  });
  return loss;
}

} // namespace tessera
