#pragma once

#include <tessera/mixed_precision/policy.h>

#include <tessera/tests/support/draw.h>

namespace tessera::testing::scripts {

/// A policy for all groups of a model, mostly none. A model computes in float, or in double: what rounds more could not be
/// compared.
MixedPrecisionPolicy random_policy(Draw& draw);

/// `policy` for one group, whose gradients are sometimes reduced in another dtype.
MixedPrecisionPolicy policy_of_group(MixedPrecisionPolicy policy, Draw& draw);

/// Whether something in it is rounded to float.
bool rounds_to_float(const MixedPrecisionPolicy& policy);

} // namespace tessera::testing::scripts
