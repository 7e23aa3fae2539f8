#pragma once

#include <tessera/mixed_precision/policy.h>

#include <optional>
#include <string>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

/// In which dtypes the models of a script compute whose unsharded side emulates a policy.
struct LowPrecision {
  explicit LowPrecision(Draw& draw);
  /// A policy of bfloat16, half or float for all groups of a model.
  MixedPrecisionPolicy policy(Draw& draw) const;
  std::string description() const;
  /// By how much a number may differ, relative to the largest of its tensor: 0 where all that is added in another order is added
  /// in double.
  double rounding() const;
  /// The same for a loss without grad mode, where operators on parameters alone compute in the dtype of the shards.
  double rounding_in_evaluation() const;

  c10::ScalarType param_dtype;
  std::optional<c10::ScalarType> reduce_dtype;
  bool casts_inputs; ///< cast_forward_inputs
  bool casts_blocks; ///< the model casts the input of each block itself, so that none of them is wider than its parameters
};

/// A policy for all groups of a model, mostly none. A model computes in float, or in double: what rounds more could not be
/// compared with a model that does not emulate it.
MixedPrecisionPolicy random_policy(Draw& draw);

/// `policy` for one group, whose gradients are sometimes reduced in another dtype.
MixedPrecisionPolicy policy_of_group(MixedPrecisionPolicy policy, Draw& draw);

/// Whether something in it is rounded to float.
bool rounds_to_float(const MixedPrecisionPolicy& policy);

} // namespace tessera::testing::scripts
