#include "random_policy.h"

#include <torch/torch.h>

namespace tessera::testing::scripts {

MixedPrecisionPolicy random_policy(Draw& draw) {
  MixedPrecisionPolicy policy;
  if (!draw.chance(15)) return policy;
  policy.param_dtype = torch::kFloat;
  if (draw.chance(40)) policy.output_dtype = draw.chance(50) ? torch::kDouble : torch::kFloat;
  if (draw.chance(40)) policy.keep_in_fp32 = {"LayerNorm", "linear", "weight", "inner0.gate"};
  return policy;
}

MixedPrecisionPolicy policy_of_group(MixedPrecisionPolicy policy, Draw& draw) {
  if (draw.chance(10)) policy.reduce_dtype = draw.chance(50) ? torch::kDouble : torch::kFloat;
  return policy;
}

bool rounds_to_float(const MixedPrecisionPolicy& policy) {
  return policy.param_dtype == torch::kFloat || policy.reduce_dtype == torch::kFloat;
}

} // namespace tessera::testing::scripts
