#pragma once

#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/model/sharded_module.h>

namespace tessera::testing {

/// How the gradients of the module's first group are reduced.
inline internal::GradientSettings settings_of(const FSDPModule& module) {
  const auto& state = module.state();
  return state->gradients(internal::ModelLock(state->schedule()->mutex())).settings;
}

} // namespace tessera::testing
