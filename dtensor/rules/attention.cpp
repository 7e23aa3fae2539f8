#include <ATen/SDPBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/rules/patterns.h>

namespace tessera::rules {

namespace {

void replace(Factorization& factors, int from, int to) {
  for (auto& input : factors.inputs) std::replace(input.factors.begin(), input.factors.end(), from, to);
  for (auto& output : factors.outputs) std::replace(output.factors.begin(), output.factors.end(), from, to);
}

/// `pattern` names the query's heads h and the key's g. Where the query has several heads for each of the key's (grouped-query
/// attention) a rank takes whole groups; where the key has one head for all, each rank takes that, and its gradient is a sum.
Factorization split_heads(const OpCall& call, std::string_view pattern, size_t query) {
  auto factors = pattern_factors(call, pattern);
  if (factors.inputs[query].factors.size() != 4 || factors.inputs[query + 1].factors.size() != 4) return whole_factors(call);
  const int heads = factors.inputs[query].factors[1], key_heads = factors.inputs[query + 1].factors[1];
  if (heads == kNoFactor || key_heads == kNoFactor) return factors;
  const auto count = factors.factors[heads].size, key_count = factors.factors[key_heads].size;
  if (key_count == 1 && count > 1) {
    factors.factors[heads].reduction = Partial{};
    replace(factors, key_heads, kNoFactor);
  } else {
    factors.factors[key_heads].even_only = count != key_count;
    replace(factors, heads, key_heads);
  }
  return factors;
}

/// query [b, h, l, e], key and value [b, g, s, e]: batch and heads split. A mask is broadcast over both, where it has them.
Factorization attention(const OpCall& call) {
  const bool full_mask = call.tensors.back().sizes.size() == 4;
  return split_heads(call, full_mask ? "bh**,bg**,bg**,bh**->bh**,bh*" : "bh**,bg**,bg**,~->bh**,bh*", 0);
}

/// gradient, query, key, value, output, logsumexp, mask.
Factorization attention_backward(const OpCall& call) {
  const bool full_mask = call.tensors.back().sizes.size() == 4;
  return split_heads(
      call, full_mask ? "bh**,bh**,bg**,bg**,bh**,bh*,bh**->bh**,bg**,bg**" : "bh**,bh**,bg**,bg**,bh**,bh*,~->bh**,bg**,bg**",
      1);
}

/// The choice of a kernel depends on the global shapes, so that all ranks choose alike. Where not on the CPU it is the formula in
/// matmul and softmax: the fused CUDA kernels have no rules.
void choose_kernel(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  for (auto& value : *stack) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto tensor = value.toTensor();
    if (const auto* meta = dtensor_meta(tensor)) {
      auto plain = at::empty_strided(meta->spec->sizes(), meta->spec->strides(), meta->local.options());
      value = plain.set_requires_grad(tensor.requires_grad());
    }
  }
  const bool on_cpu = stack->at(stack->size() - op.schema().arguments().size()).toTensor().is_cpu();
  op.callBoxed(*stack);
  if (!on_cpu) stack->back() = static_cast<int64_t>(at::SDPBackend::math);
}

} // namespace

void register_attention(Registry& registry) {
  registry.add("_scaled_dot_product_flash_attention_for_cpu", {.factorize = attention});
  registry.add("_scaled_dot_product_flash_attention_for_cpu_backward", {.factorize = attention_backward});
  registry.add("_fused_sdp_choice", {.handler = choose_kernel});
}

} // namespace tessera::rules
