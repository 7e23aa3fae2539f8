#pragma once

// Internal: what a mixed precision policy makes of each parameter.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include <tessera/fsdp/model/module_walk.h>
#include <tessera/mixed_precision/policy.h>

namespace tessera::internal {

/// The dtype in which forward reads each of `parameters`, which lie below the tops of `walk`: `param_dtype`, Float for those that
/// `keep_in_fp32` names, and a parameter's own where it is no floating-point one or the policy has no `param_dtype`.
std::vector<at::ScalarType> unsharded_dtypes(const ModuleWalk& walk, const std::vector<at::Tensor>& parameters,
                                             const MixedPrecisionPolicy& policy);

/// An error that names a norm of LibTorch with parameters among these whose running statistics have another dtype than its
/// weight has in forward: its kernel cannot mix them. `dtype`: that of all floating-point parameters and buffers from now on.
void check_norms(const ModuleWalk& walk, const std::vector<at::Tensor>& parameters, const std::vector<at::ScalarType>& dtypes,
                 std::optional<at::ScalarType> dtype = {});

} // namespace tessera::internal
