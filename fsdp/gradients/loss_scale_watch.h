#pragma once

// Internal: whether gradients in fp16 are made of losses that nothing has scaled.

#include <c10/util/Exception.h>

#include <atomic>
#include <vector>

#include <tessera/fsdp/group/parameter_group.h>

namespace tessera::internal {

/// One a process.
struct LossScaleWatch {
  std::atomic<bool> was_scaled = false; ///< a loss, by a GradScaler
  std::atomic<bool> has_warned = false;

  static LossScaleWatch& instance() {
    static LossScaleWatch watch;
    return watch;
  }

  /// Warns once, by one rank, where some gradients of those that take part are in fp16. Called before their reduction.
  void see(const ParameterGroup& group, const std::vector<bool>& takes_part) {
    if (was_scaled || has_warned || !group.roles().is_first_rank()) return;
    bool has_half = false;
    for (size_t i = 0; i < takes_part.size(); ++i)
      has_half = has_half || (takes_part[i] && group.parameters()[i].forward.dtype == at::kHalf);
    if (!has_half || has_warned.exchange(true)) return;
    TORCH_WARN(group.label(),
               " has gradients in fp16, and no loss was scaled: those below 6e-8 are zeros, and training may stall. "
               "Scale the loss with tessera::GradScaler, or take bf16. (This warning comes once, from one rank.)");
  }
};

} // namespace tessera::internal
