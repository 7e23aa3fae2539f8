#include <tessera/parallel/context/attention_call.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <utility>

#include <tessera/parallel/context/attention_blocks.h>

namespace tessera::internal {

namespace {

at::Tensor range_of(const at::Tensor& mask, int64_t dim, const PositionRange& range) {
  return mask.size(dim) == 1 ? mask : mask.narrow(dim, range.begin, range.size());
}

/// The rows and columns of a block, in the dtype of the queries.
at::Tensor mask_of(const AttentionCall& call, const AttentionBlock& block, at::ScalarType dtype) {
  if (!call.mask.defined()) return {};
  auto mask = range_of(range_of(call.mask, 2, block.query), 3, block.key);
  mask = mask.expand({mask.size(0), mask.size(1), block.query.size(), block.key.size()});
  if (mask.scalar_type() != at::kBool) return mask.to(dtype).contiguous();
  return at::zeros(mask.sizes(), mask.options().dtype(dtype)).masked_fill_(mask.logical_not(), -kInfinity);
}

/// The place of a range of positions in what holds it.
int64_t offset_in(const HeldRange& held, const PositionRange& range) { return held.offset + range.begin - held.positions.begin; }

at::Tensor rows(const at::Tensor& tensor, int64_t offset, const PositionRange& range) {
  return tensor.narrow(2, offset, range.size());
}

/// Calls `use(block, offset of its queries, offset of its keys)` for all blocks of some queries and keys.
template <typename Use>
void for_each_block(const AttentionCall& call, const std::vector<HeldRange>& queries, const std::vector<HeldRange>& keys,
                    const Use& use) {
  for (const auto& query : queries) {
    for (const auto& key : keys) {
      for (const auto& block : blocks_between(query.positions, key.positions, call.is_causal, call.documents))
        use(block, offset_in(query, block.query), offset_in(key, block.key));
    }
  }
}

} // namespace

QueriesForward::QueriesForward(const AttentionCall& call, at::Tensor query, std::vector<HeldRange> held, int64_t value_features)
    : call_(call), query_(std::move(query)), held_(std::move(held)) {
  const auto options = query_.options().dtype(wide_dtype(query_.scalar_type()));
  out_ = at::zeros({query_.size(0), query_.size(2), query_.size(1), value_features}, options).transpose(1, 2);
  lse_ = at::full({query_.size(0), query_.size(1), query_.size(2)}, -kInfinity, options);
}

void QueriesForward::see(const at::Tensor& key, const at::Tensor& value, const std::vector<HeldRange>& held) {
  if (query_.numel() == 0 || value.numel() == 0) return;
  for_each_block(call_, held_, held, [&](const AttentionBlock& block, int64_t of_queries, int64_t of_keys) {
    merge(of_queries, attend({rows(query_, of_queries, block.query).contiguous(), rows(key, of_keys, block.key).contiguous(),
                              rows(value, of_keys, block.key).contiguous(), mask_of(call_, block, query_.scalar_type()),
                              block.is_causal, call_.scale}));
  });
}

// Of blocks with outputs o, p and logarithms a, b of their sums, the output is the mean that these sums weigh: o - σ(b - a)(o -
// p). So a first block is taken as it is. Where neither block sees a key, b - a is no number, and both outputs are 0.
void QueriesForward::merge(int64_t offset, const BlockResult& result) {
  const PositionRange range{0, result.out.size(2)};
  auto out = rows(out_, offset, range), lse = rows(lse_, offset, range);
  const auto weight = (result.lse - lse).nan_to_num_(0).sigmoid_().unsqueeze_(-1);
  out.sub_((out - result.out).mul_(weight));
  lse.copy_(at::logaddexp(lse, result.lse));
}

QueriesBackward::QueriesBackward(const AttentionCall& call, const KeptAttention& kept, at::Tensor gradient,
                                 std::vector<HeldRange> held)
    : call_(call),
      query_(kept.query),
      out_(kept.out),
      lse_(kept.lse),
      gradient_(std::move(gradient)),
      held_(std::move(held)),
      query_gradient_(at::zeros_like(query_, query_.options().dtype(wide_dtype(query_.scalar_type())))) {}

void QueriesBackward::see(const at::Tensor& key, const at::Tensor& value, const std::vector<HeldRange>& held,
                          const at::Tensor& key_gradient, const at::Tensor& value_gradient) {
  if (query_.numel() == 0 || value.numel() == 0) return;
  for_each_block(call_, held_, held, [&](const AttentionBlock& block, int64_t of_queries, int64_t of_keys) {
    const auto of_query = [&](const at::Tensor& tensor) { return rows(tensor, of_queries, block.query).contiguous(); };
    const auto gradients = attend_backward(
        {of_query(query_), rows(key, of_keys, block.key).contiguous(), rows(value, of_keys, block.key).contiguous(),
         mask_of(call_, block, query_.scalar_type()), block.is_causal, call_.scale},
        of_query(gradient_), of_query(out_), of_query(lse_));
    rows(query_gradient_, of_queries, block.query).add_(gradients.query);
    rows(key_gradient, of_keys, block.key).add_(gradients.key);
    rows(value_gradient, of_keys, block.key).add_(gradients.value);
  });
}

} // namespace tessera::internal
