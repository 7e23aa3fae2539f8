#pragma once

// Internal: gradients that nothing has reduced, and their reduction in one bit an element.

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/optim/parts/shared_sums.h>
#include <tessera/optim/parts/stepped.h>

namespace tessera::internal {

/// A parameter that every rank has whole, and what a rank has for it.
struct OwnGradient {
  at::Tensor parameter;
  at::Tensor values;    ///< whole, row-major, plain, in float or double: a copy
  bool is_mean = false; ///< over the ranks, otherwise of this one
};

/// The gradients of one step.
struct OwnGradients {
  CommunicatorPtr ranks; ///< null where there is one
  std::vector<OwnGradient> all;
};

/// Gathers those of the parameters that some rank has a gradient of, in the order of `optimizer`. Takes one small all-reduce.
/// Errors, which `name` begins: a sharded parameter, several meshes, a gradient that is sparse, complex or waits for its
/// reduction.
OwnGradients own_gradients(const torch::optim::Optimizer& optimizer, const std::string& name);

/// Gathers the parameters for which `takes` is true, the same on all ranks, with values of zeros.
OwnGradients zeros_in_place_of_gradients(const torch::optim::Optimizer& optimizer, const std::string& name,
                                         const std::function<bool(const at::Tensor&)>& takes);

/// Replaces the values at `places` by their means, with one all-reduce.
void average(OwnGradients& gradients, const std::vector<size_t>& places, const std::string& name);

/// What is to be reduced in one bit, whole, plain and row-major, and the errors of before (1-D). All are written.
struct OneBitShare {
  at::Tensor values;
  at::Tensor worker_error; ///< of `values`' elements
  at::Tensor server_error; ///< `one_bit_part` elements
};

/// The elements of a rank's part of a reduction of `numel` elements: whole bytes of signs.
int64_t one_bit_part(int64_t numel, int64_t ranks);

/// Replaces the values by their mean over the ranks in one bit, with one all-to-all and one all-gather. Those of all shares have
/// one dtype. Every rank calls it with shares of the same sizes.
void one_bit_mean(const std::vector<OneBitShare>& shares, Communicator& ranks, const std::string& name);

/// The state of a parameter for the reduction, where it is not there yet.
void prepare_errors(const OwnGradient& of, at::Tensor& worker_error, at::Tensor& server_error);
/// The share that reduces `values`.
OneBitShare share_of(const at::Tensor& values, const at::Tensor& worker_error, const at::Tensor& server_error);

/// Adds to the parameter.
void add_to(const at::Tensor& parameter, const at::Tensor& update, double factor);

/// What an optimizer of this kind steps.
template <typename State, typename Options>
struct OneBitEntry {
  OwnGradient* gradient;
  State* state;
  const Options* options;
};

template <typename State, typename Options>
std::vector<OneBitEntry<State, Options>> one_bit_entries(torch::optim::Optimizer& optimizer, OwnGradients& gradients) {
  std::vector<OneBitEntry<State, Options>> entries;
  for (auto& each : gradients.all) {
    auto& kept = optimizer.state()[each.parameter.unsafeGetTensorImpl()];
    if (!kept) kept = std::make_unique<State>();
    entries.push_back({&each, static_cast<State*>(kept.get()), nullptr});
  }
  size_t next = 0;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (next < entries.size() && entries[next].gradient->parameter.is_same(parameter))
        entries[next++].options = &static_cast<const Options&>(group.options());
    }
  }
  return entries;
}

/// Whether the entry reduces in one bit: its warm-up is over.
template <typename State, typename Options>
bool is_frozen(const OneBitEntry<State, Options>& entry) {
  return entry.state->step() > entry.options->freeze_step();
}

/// Counts a step, and makes the moments and the errors that it needs.
template <typename State, typename Options>
void begin_step(const OneBitEntry<State, Options>& entry) {
  auto& state = *entry.state;
  const auto& [parameter, values, is_mean] = *entry.gradient;
  state.step(state.step() + 1);
  if (!state.exp_avg().defined()) {
    state.exp_avg(zeros_as(parameter, values.scalar_type()));
    state.exp_avg_sq(zeros_as(parameter, values.scalar_type()));
  }
  if (is_frozen(entry)) prepare_errors(*entry.gradient, state.worker_error(), state.server_error());
}

} // namespace tessera::internal
