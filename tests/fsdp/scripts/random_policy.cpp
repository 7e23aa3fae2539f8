#include "random_policy.h"

#include <torch/torch.h>

#include <algorithm>
#include <vector>

namespace tessera::testing::scripts {
namespace {

/// Half of a unit in the last place of 1.
double roundoff(c10::ScalarType dtype) {
  switch (dtype) {
    case torch::kBFloat16: return 0x1p-9;
    case torch::kHalf: return 0x1p-11;
    case torch::kFloat: return 0x1p-24;
    default: return 0;
  }
}

} // namespace

LowPrecision::LowPrecision(Draw& draw)
    : param_dtype(draw.of(std::vector{torch::kBFloat16, torch::kBFloat16, torch::kHalf, torch::kFloat})),
      casts_inputs(draw.chance(85)),
      casts_blocks(draw.chance(85)) {
  if (draw.chance(60)) {
    reduce_dtype = torch::kDouble; // exact
  } else if (draw.chance(60)) {
    reduce_dtype = draw.of(std::vector{torch::kBFloat16, torch::kHalf, torch::kFloat});
  }
}

MixedPrecisionPolicy LowPrecision::policy(Draw& draw) const {
  MixedPrecisionPolicy policy;
  policy.param_dtype = param_dtype;
  policy.reduce_dtype = reduce_dtype;
  if (draw.chance(40)) policy.output_dtype = draw.chance(50) ? torch::kDouble : torch::kFloat; // which hold all that it has
  policy.cast_forward_inputs = casts_inputs;
  if (draw.chance(30))
    policy.keep_in_fp32 = draw.of(std::vector<std::vector<std::string>>{
        {"LayerNorm"}, {"scale", "shift"}, {"gate", "gain", "head"}, {"LayerNorm", "GroupNorm", "head"}});
  return policy;
}

std::string LowPrecision::description() const {
  return c10::str("in ", param_dtype, reduce_dtype ? c10::str(", reduced in ", *reduce_dtype) : "",
                  casts_inputs ? "" : ", inputs as they come", casts_blocks ? ", blocks cast their inputs" : "");
}

/// A sum of at most 12 numbers, 3 micro-batches on 4 ranks, that is rounded each time, and the next rounding of what it changes.
double LowPrecision::rounding() const {
  if (reduce_dtype == torch::kDouble) return 0;
  return 16 * std::max(roundoff(param_dtype), roundoff(reduce_dtype.value_or(param_dtype)));
}

double LowPrecision::rounding_in_evaluation() const { return 32 * roundoff(param_dtype); }

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
