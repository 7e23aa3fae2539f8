#pragma once

// Internal: ranges in LibTorch's profiler, and with it in NVTX, which name what the schedule does.

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace tessera::internal {

class ParameterGroup;

/// From here to the end of the scope: "FSDP::all_gather (blocks.1: weight, bias)". Costs a look at whether somebody profiles.
class ProfilerRange {
 public:
  ProfilerRange(const char* what, const ParameterGroup& group) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    function_.emplace(std::move(*callbacks));
    if (function_->isActive()) function_->before(name(what, group));
  }

 private:
  /// Names the range by the first few of the group's parameters.
  static std::string name(const char* what, const ParameterGroup& group);

  std::optional<at::RecordFunction> function_;
};

} // namespace tessera::internal
