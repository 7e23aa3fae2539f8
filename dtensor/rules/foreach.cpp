#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>

#include <algorithm>
#include <array>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

Factorize elementwise(absl::InlinedVector<PartialFlow, 2> flows) {
  return [flows = std::move(flows)](const OpCall& call) {
    auto factors = pointwise_factors(call);
    factors.partial = flows;
    return factors;
  };
}

/// The parts of a list of DTensors that lie as those of `like` do, position by position, so that what is done to the parts is
/// done to the tensors. Nothing where they do not, where one is Partial or a copy of another's data, or this rank is outside the
/// mesh.
std::optional<std::vector<at::Tensor>> aligned_parts(const c10::IValue& list, const c10::IValue& like) {
  const auto tensors = list.toListRef(), others = like.toListRef();
  std::vector<at::Tensor> parts;
  if (tensors.empty()) return parts;
  if (tensors.size() != others.size()) return std::nullopt;
  parts.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto *meta = dtensor_meta(tensors[i].toTensor()), *other = dtensor_meta(others[i].toTensor());
    const bool aligned = meta && other && meta->spec == other->spec && !meta->copied_at_version && !meta->spec->has_partial();
    if (!aligned || !meta->spec->on_mesh()) return std::nullopt;
    parts.push_back(meta->local);
  }
  return parts;
}

/// A fused Adam step on the parts. Optimizers call it with every parameter of a model: a plan would cost more than the step.
template <auto Step>
bool fused_adam(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  constexpr size_t kArguments = 15, kLists = 5;
  const auto argument = [&](size_t i) -> const c10::IValue& { return (*stack)[stack->size() - kArguments + i]; };
  if (at::GradMode::is_enabled() || !op.schema().returns().empty()) return false; // not the in-place one
  std::array<std::vector<at::Tensor>, kLists> parts;
  for (size_t i = 0; i < kLists; ++i) {
    auto list = aligned_parts(argument(i), argument(0));
    if (!list) return false;
    parts[i] = std::move(*list);
  }
  const auto steps = argument(kLists).toTensorVector();
  const auto plain = [](const at::Tensor& tensor) { return dtensor_meta(tensor) == nullptr && tensor.dim() == 0; };
  const bool scaled = !argument(13).isNone() || !argument(14).isNone();
  if (scaled || !std::all_of(steps.begin(), steps.end(), plain)) return false;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kDTensorKey));
  Step(parts[0], parts[1], parts[2], parts[3], parts[4], steps, argument(6).toDouble(), argument(7).toDouble(),
       argument(8).toDouble(), argument(9).toDouble(), argument(10).toDouble(), argument(11).toBool(), argument(12).toBool(),
       std::nullopt, std::nullopt);
  stack->resize(stack->size() - kArguments);
  return true;
}

} // namespace

void register_foreach(Registry& registry) {
  registry.add(
      "_foreach_abs _foreach_acos _foreach_asin _foreach_atan _foreach_ceil _foreach_clamp_max _foreach_clamp_min _foreach_cos "
      "_foreach_cosh _foreach_div.Tensor _foreach_erf _foreach_erfc _foreach_exp _foreach_expm1 _foreach_floor _foreach_frac "
      "_foreach_lgamma _foreach_log _foreach_log10 _foreach_log1p _foreach_log2 _foreach_maximum _foreach_minimum _foreach_pow "
      "_foreach_reciprocal _foreach_round _foreach_rsqrt _foreach_sigmoid _foreach_sign _foreach_sin _foreach_sinh _foreach_sqrt "
      "_foreach_tan _foreach_tanh _foreach_trunc _foreach_add.Scalar _foreach_add.ScalarList _foreach_sub.Scalar "
      "_foreach_sub.ScalarList _foreach_lerp.List _foreach_lerp.ScalarList _foreach_addcdiv _foreach_addcmul "
      "_fused_adam _fused_adamw _fused_sgd _fused_adagrad",
      {.factorize = elementwise({}), .foreach = true});
  registry.add("_fused_adam.",
               {.factorize = elementwise({}), .direct = fused_adam<&at::_ops::_fused_adam_::call>, .foreach = true});
  registry.add("_fused_adamw.",
               {.factorize = elementwise({}), .direct = fused_adam<&at::_ops::_fused_adamw_::call>, .foreach = true});
  registry.add("_foreach_add _foreach_sub _foreach_lerp",
               {.factorize = elementwise({flow(kEveryInput, kLinearOps)}), .foreach = true});
  registry.add("_foreach_neg", {.factorize = elementwise({flow(1, kScaleOps)}), .foreach = true});
  registry.add("_foreach_mul", {.factorize = elementwise({flow(1, kScaleOps), flow(2, kScaleOps)}), .foreach = true});
  registry.add("_foreach_div", {.factorize = elementwise({flow(1, kScaleOps)}), .foreach = true});
  registry.add("_foreach_zero", {.factorize = elementwise({flow(1, kAllOps)}), .foreach = true});
  registry.add("_foreach_copy", {.factorize = elementwise({flow(3, kAllOps)}), .foreach = true, .plain_is_replicate = true});
}

} // namespace tessera::rules
