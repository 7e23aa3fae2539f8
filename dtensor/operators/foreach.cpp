#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

void register_foreach(Registry& registry) {
  registry.add(
      "_foreach_abs _foreach_acos _foreach_asin _foreach_atan _foreach_ceil _foreach_clamp_max _foreach_clamp_min _foreach_cos "
      "_foreach_cosh _foreach_div.Tensor _foreach_erf _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac "
      "_foreach_lgamma _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_maximum _foreach_minimum _foreach_pow "
      "_foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sinh _foreach_sqrt "
      "_foreach_tan _foreach_tanh _foreach_trunc _foreach_add.Scalar _foreach_add.ScalarList _foreach_sub.Scalar "
      "_foreach_sub.ScalarList _foreach_lerp.List _foreach_lerp.ScalarList _foreach_addcdiv _foreach_addcmul _fused_adam "
      "_fused_adamw _fused_sgd _fused_adagrad",
      OnLocals(elementwise({})).with(Trait::kListElements));
  // The tensor is one for all positions: it must be Replicate in each.
  registry.add("_foreach_add.Tensor", OnLocals(elementwise({})).with(Trait::kListElements));
  registry.add("_foreach_mul.Tensor", OnLocals(elementwise({flow({0}, kScaleOps)})).with(Trait::kListElements));
  registry.add("_foreach_add _foreach_sub _foreach_lerp",
               OnLocals(elementwise({flow(kEveryInput, kLinearOps)})).with(Trait::kListElements));
  registry.add("_foreach_neg", OnLocals(elementwise({flow({0}, kScaleOps)})).with(Trait::kListElements));
  registry.add("_foreach_mul", OnLocals(elementwise({flow({0}, kScaleOps), flow({1}, kScaleOps)})).with(Trait::kListElements));
  registry.add("_foreach_div", OnLocals(elementwise({flow({0}, kScaleOps)})).with(Trait::kListElements));
  registry.add("_foreach_zero", OnLocals(elementwise({flow({0}, kAllOps)})).with(Trait::kListElements));
  registry.add("_foreach_copy", OnLocals(copy_factors).with({Trait::kListElements, Trait::kPlainIsReplicate}));
}

} // namespace tessera::internal::rules
