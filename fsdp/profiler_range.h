#pragma once

// Internal: ranges in LibTorch's profiler, and with it in NVTX, which name what the schedule does.

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace tessera::internal {

/// From here to the end of the scope: "FSDP::all_gather (blocks.1)". Costs a look at whether somebody profiles.
class ProfilerRange {
 public:
  ProfilerRange(const char* what, const std::string& label) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    function_.emplace(std::move(*callbacks));
    if (function_->isActive()) function_->before(std::string("FSDP::") + what + " (" + label + ")");
  }

 private:
  std::optional<at::RecordFunction> function_;
};

} // namespace tessera::internal
