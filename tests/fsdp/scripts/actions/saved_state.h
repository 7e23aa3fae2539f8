#pragma once

#include <algorithm>

#include <tessera/tests/fsdp/scripts/side.h>

namespace tessera::testing::scripts {

/// What a checkpoint of a trainee holds.
inline StateDict state_of(Trainee& trainee) {
  auto state = state_dict(*trainee.model, *trainee.optimizer);
  if (trainee.average) state.merge(state_dict(*trainee.average));
  if (trainee.schedule) state.merge(state_dict(*trainee.schedule));
  return state;
}

/// Files cannot hold complex numbers of double precision.
inline bool has_complex_parameters(const torch::nn::Module& module) {
  const auto all = module.parameters();
  return std::any_of(all.begin(), all.end(), [](const Tensor& parameter) { return parameter.is_complex(); });
}

inline void clear(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.zero_();
  for (auto& buffer : module.buffers(/*recurse=*/false)) buffer.zero_();
}

} // namespace tessera::testing::scripts
