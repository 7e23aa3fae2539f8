#pragma once

// Internal: how the gradients of one group are reduced, as FSDPModule and no_sync set it.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/fsdp/gradients/gradient_taker.h>

namespace tessera::internal {

struct GradientSettings {
  bool requires_sync = true, requires_all_reduce = true; ///< outside of scopes of no_sync
  int64_t no_sync_scopes = 0;                            ///< that are open
  bool reshard_after_backward = true;
  bool keeps_own = false;       ///< nothing is reduced: `grad()` gets the rank's own gradient, as a Partial
  bool has_only_buffer = false; ///< the reductions of other groups end before there is a reduce buffer
  /// Called with the flat reduced gradients of each reduction, before they are divided by a factor of the program's. See
  /// FSDPModule.
  std::function<void(const at::Tensor&)> all_reduce_hook = {};
  std::optional<c10::Stream> hook_stream = {}; ///< on which it is called as soon as the reduction is launched
  std::optional<double> divide_factor = {};    ///< the program's
  /// Optimizers that step in backward, in the order in which the program asked for them.
  std::vector<std::shared_ptr<GradientTaker>> takers = {};

  bool sync() const { return requires_sync && no_sync_scopes == 0; }
  bool all_reduce() const { return requires_all_reduce && no_sync_scopes == 0; }
  void open_scope() { ++no_sync_scopes; }
  /// One that `reshard_parameters` has made since may have none that is open.
  void close_scope() {
    if (no_sync_scopes > 0) --no_sync_scopes;
  }
};

} // namespace tessera::internal
