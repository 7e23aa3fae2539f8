// Each rank gathers the keys and values of all, and computes its own queries.

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <tessera/parallel/context/part_exchange.h>

namespace tessera::internal {

namespace {

struct KeysAndValues {
  at::Tensor key, value;
};

/// Keys and values in the order of the positions.
KeysAndValues gather_keys(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value) {
  const auto rows = gathered(call, packed({key, value}), label_of(call, "keys and values", {key, value}));
  std::vector<at::Tensor> keys, values;
  for (int64_t rank = 0; rank < call.ranks(); ++rank) {
    const auto parts = unpacked(rows[rank], {key.sizes().vec(), value.sizes().vec()});
    keys.push_back(parts[0]);
    values.push_back(parts[1]);
  }
  return {whole_of(keys, 2, call.keys), whole_of(values, 2, call.keys)};
}

} // namespace

AttentionResult all_gather_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value) {
  QueriesForward forward(call, query, call.queries.held_by(call.rank()), value.size(3));
  const auto all = gather_keys(call, key, value);
  forward.see(all.key, all.value, call.keys.whole());
  const auto out = forward.out();
  return {out, {query, key, value, out, forward.lse()}};
}

BlockGradients all_gather_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient) {
  QueriesBackward backward(call, kept, gradient, call.queries.held_by(call.rank()));
  const auto all = gather_keys(call, kept.key, kept.value);
  const auto options = kept.key.options().dtype(wide_dtype(kept.key.scalar_type()));
  const auto of_keys = at::zeros(all.key.sizes(), options), of_values = at::zeros(all.value.sizes(), options);
  backward.see(all.key, all.value, call.keys.whole(), of_keys, of_values);
  std::vector<at::Tensor> rows;
  for (int64_t rank = 0; rank < call.ranks(); ++rank)
    rows.push_back(packed({part_of(of_keys, 2, call.keys, rank), part_of(of_values, 2, call.keys, rank)}));
  const auto mine = reduced(call, at::stack(rows), label_of(call, "gradients of keys and values", {kept.key, kept.value}));
  const auto parts = unpacked(mine, {kept.key.sizes().vec(), kept.value.sizes().vec()});
  const auto dtype = kept.key.scalar_type();
  return {backward.query_gradient(), parts[0].to(dtype), parts[1].to(dtype)};
}

} // namespace tessera::internal
