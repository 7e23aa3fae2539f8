#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::rules {

namespace {

/// query [b, h, l, e], key and value [b, h, s, e]: batch and heads split. A mask is broadcast over both, where it has them.
Factorization attention(const OpCall& call) {
  const bool full_mask = call.tensors.back().sizes.size() == 4;
  return pattern_factors(call, full_mask ? "bh**,bh**,bh**,bh**->bh**,bh*" : "bh**,bh**,bh**,~->bh**,bh*");
}

/// gradient, query, key, value, output, logsumexp, mask.
Factorization attention_backward(const OpCall& call) {
  const bool full_mask = call.tensors.back().sizes.size() == 4;
  return pattern_factors(
      call, full_mask ? "bh**,bh**,bh**,bh**,bh**,bh*,bh**->bh**,bh**,bh**" : "bh**,bh**,bh**,bh**,bh**,bh*,~->bh**,bh**,bh**");
}

/// The choice of a kernel depends on the global shapes, so that all ranks choose alike.
void choose_kernel(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  for (auto& value : *stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto tensor = value.toTensor();
    if (const auto* meta = dtensor_meta(tensor)) {
      auto plain = at::empty_strided(meta->spec->sizes(), meta->spec->strides(), meta->local.options());
      value = plain.set_requires_grad(tensor.requires_grad());
    }
  }
  op.callBoxed(*stack);
}

} // namespace

void register_attention(Registry& registry) {
  registry.add("_scaled_dot_product_flash_attention_for_cpu", {.factorize = attention});
  registry.add("_scaled_dot_product_flash_attention_for_cpu_backward", {.factorize = attention_backward});
  registry.add("_fused_sdp_choice", {.handler = choose_kernel});
}

} // namespace tessera::rules
