#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

/// weight [vocabulary, width], indices [...] → [..., width]; the vocabulary is whole.
Factorization embedding(const OpCall& call) {
  Factorization factors;
  const auto& weight = call.tensors[0].sizes;
  TORCH_CHECK(weight.size() == 2, call.name, ": the weight must have 2 dims, not ", weight.size());
  const int width = factors.add_factor(weight[1]);
  factors.inputs.push_back({{kNoFactor, width}, weight});
  factors.inputs.push_back(fresh_dims(factors, call.tensors[1].sizes));
  auto output = factors.inputs[1];
  output.factors.push_back(width);
  output.sizes.push_back(weight[1]);
  factors.outputs.push_back(std::move(output));
  factors.partial.push_back(flow(1, kLinearOps));
  return factors;
}

/// gradient [..., width], indices [...] → [vocabulary, width], summed over the indices. Not with scale_grad_by_freq, which counts
/// them.
Factorization embedding_backward(const OpCall& call) {
  Factorization factors;
  const auto indices = fresh_dims(factors, call.tensors[1].sizes);
  const bool counts = call.flag("scale_grad_by_freq", false);
  auto gradient = indices;
  auto whole = indices;
  for (auto& factor : whole.factors) {
    factors.factors[factor].reduction = Partial{};
    if (counts) factor = kNoFactor;
  }
  if (counts) gradient.factors = whole.factors;
  const auto size = call.tensors[0].sizes.back();
  const int width = factors.add_factor(size);
  gradient.factors.push_back(width);
  gradient.sizes.push_back(size);
  factors.inputs.push_back(std::move(gradient));
  factors.inputs.push_back(std::move(whole));
  factors.outputs.push_back({{kNoFactor, width}, {call.integer("num_weights", 0), size}});
  factors.partial.push_back(flow(1, kLinearOps));
  return factors;
}

} // namespace

void register_embedding(Registry& registry) {
  registry.add("embedding", {.factorize = embedding});
  registry.add("embedding_dense_backward", {.factorize = embedding_backward});
}

} // namespace tessera::rules
