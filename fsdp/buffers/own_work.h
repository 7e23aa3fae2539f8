#pragma once

// Internal: operators of the library's own, amid those of the program.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <tessera/activations/kept_results.h>

namespace tessera::internal {

/// While it lives, autograd records nothing, and a `recompute` around it neither counts nor keeps results: what its first run
/// gathers ahead is another group than in the second.
struct OwnWork {
  const at::NoGradGuard no_grad = {};
  const at::AutoDispatchBelowADInplaceOrView below_autograd = {};
  const KeptResults::Scope keeps_nothing = {};
};

} // namespace tessera::internal
