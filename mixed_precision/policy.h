#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The dtypes of a `fully_shard` group, with FSDP2's meaning (MixedPrecisionPolicy). Unset means: leave as it is.
/// docs/mixed_precision.md has the dtype of every tensor, and where it differs from FSDP2's.
///
/// | | parameters in forward | their gradients' reduction | the inputs of what reads them |
/// |---|---|---|---|
/// | no `param_dtype` | their own dtype | `reduce_dtype`, or their own | as they come |
/// | `param_dtype` | in it | `reduce_dtype`, or `param_dtype` | cast to it |
/// | in `keep_in_fp32` | Float | `reduce_dtype`, or Float, with the whole group | cast to Float |
struct MixedPrecisionPolicy {
  /// Dtype of the unsharded parameters in forward and backward; the shards keep their own. Cast on the shard, before the
  /// all-gather.
  std::optional<c10::ScalarType> param_dtype;
  /// Dtype of the gradient reduction; unset: `param_dtype`, and without that the gradient's own; Float in a group with parameters
  /// of both `param_dtype` and `keep_in_fp32`.
  std::optional<c10::ScalarType> reduce_dtype;
  /// Dtype that floating-point forward outputs are cast to at an explicit boundary (`tessera::call`). A forward that is called
  /// directly casts nothing, and warns.
  std::optional<c10::ScalarType> output_dtype;
  /// Casts floating-point forward inputs to `param_dtype`.
  bool cast_forward_inputs = true;
  /// What computes in fp32 in spite of `param_dtype`: parameters that are read in Float, and the inputs beside them cast to it.
  /// An entry is a type ("BatchNorm2d", "my::RMSNormImpl"), or the last parts of the path of a module or parameter below the
  /// module given to `fully_shard` ("norm", "head.1", "head.1.weight"). A module stands for all below it. Entries that name
  /// nothing in one call may name something in the next, so they are no error.
  ///
  /// LibTorch's BatchNorm and InstanceNorm with running statistics need it on the CPU: their kernels cannot mix a weight in half
  /// precision with statistics in fp32, so `fully_shard` refuses them otherwise. LayerNorm and GroupNorm do not, and neither does
  /// what `convert_sync_batch_norm` took.
  std::vector<std::string> keep_in_fp32 = {};
  bool operator==(const MixedPrecisionPolicy&) const = default;
};

} // namespace tessera
