#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

/// The dtypes of a `fully_shard` group, with FSDP2's meaning (MixedPrecisionPolicy). Unset means: leave as it is.
struct MixedPrecisionPolicy {
  /// Dtype of the unsharded parameters in forward and backward; the shards keep their own. Cast on the shard, before the
  /// all-gather.
  std::optional<c10::ScalarType> param_dtype;
  /// Dtype of the gradient reduction; unset: `param_dtype`, and without that the gradient's own.
  std::optional<c10::ScalarType> reduce_dtype;
  /// Dtype that floating-point forward outputs are cast to at an explicit boundary (`tessera::call`).
  std::optional<c10::ScalarType> output_dtype;
  /// Casts floating-point forward inputs to `param_dtype`.
  bool cast_forward_inputs = true;
  bool operator==(const MixedPrecisionPolicy&) const = default;
};

} // namespace tessera
