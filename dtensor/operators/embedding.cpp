#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

namespace {

/// weight [vocabulary, width], indices [...] → [..., width]. Where the vocabulary is split, each rank looks up its own rows, and
/// the result is a MaskPartial: no rank gathers the table. (DTensor: the row-wise strategy.)
Factorization embedding(const OpCall& call) {
  Factorization factors;
  const auto& weight = call.tensors[0].sizes;
  TORCH_CHECK(weight.size() == 2, call.name, ": the weight must have 2 dims, not ", weight.size());
  const int vocabulary = factors.add_factor(weight[0]), width = factors.add_factor(weight[1]);
  factors.factors[vocabulary].reduction = Partial{Partial::Op::kMask};
  factors.inputs.push_back({{vocabulary, width}, weight});
  factors.inputs.push_back(fresh_dims(factors, call.tensors[1].sizes));
  auto output = factors.inputs[1];
  output.add(width, weight[1]);
  factors.add_output(std::move(output), kLinearOps);
  return factors;
}

/// Zeros for the rows that this rank does not hold.
void embedding_local(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  const auto& weight = call.arg(0).toTensor();
  const auto rows = spec.sizes()[0], first = spec.local_offsets()[0], mine = weight.size(0);
  if (mine == rows) return call.op.callBoxed(*call.stack);
  const auto& indices = call.arg(1).toTensor();
  at::_assert_async(indices.ge(0).logical_and_(indices.lt(rows)).all(), call.op.schema().name() + ": index out of range in self");
  const auto position = indices.sub(first);
  const auto elsewhere = position.lt(0).logical_or_(position.ge(mine));
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  call.finish_out(mine == 0 ? at::zeros(sizes, weight.options())
                            : at::embedding(weight, position.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0));
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
  gradient.add(width, size);
  factors.inputs.push_back(std::move(gradient));
  factors.inputs.push_back(std::move(whole));
  factors.add_output({{kNoFactor, width}, {call.integer("num_weights", 0), size}}, kLinearOps);
  return factors;
}

} // namespace

void register_embedding(Registry& registry) {
  registry.add("embedding", OnLocals(embedding).run(embedding_local));
  registry.add("embedding_dense_backward", OnLocals(embedding_backward));
}

} // namespace tessera::internal::rules
