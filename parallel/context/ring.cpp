// Keys and values go round from rank to rank. Each rank sends on what it has while it computes with it.

#include <ATen/ops/zeros.h>

#include <optional>

#include <tessera/parallel/context/part_exchange.h>

namespace tessera::internal {

namespace {

/// Whose keys this rank has at a step.
int64_t owner_at(const AttentionCall& call, int64_t step) { return (call.rank() - step + call.ranks()) % call.ranks(); }

/// Calls `use(key, value, rank of their owner)` for the parts of all ranks, its own first.
template <typename Use>
void for_each_part(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value, const Use& use) {
  const auto label = label_of(call, "keys and values", {key, value});
  auto flat = packed({key, value});
  for (int64_t step = 0; step < call.ranks(); ++step) {
    std::optional<Rotation> next;
    if (step + 1 < call.ranks()) next.emplace(call, flat, label);
    const auto parts = unpacked(flat, {key.sizes().vec(), value.sizes().vec()});
    use(parts[0], parts[1], owner_at(call, step));
    if (next) flat = next->wait();
  }
}

} // namespace

AttentionResult ring_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  QueriesForward forward(call, query, call.queries.held_by(call.rank()), value.size(3));
  for_each_part(call, key, value, [&](const at::Tensor& its_key, const at::Tensor& its_value, int64_t owner) {
    forward.see(its_key, its_value, call.keys.held_by(owner));
  });
  const auto out = forward.out();
  return {out, {query, key, value, out, forward.lse()}};
}

// The gradients of keys and values follow these round, each rank adds its own, and a last step brings them home.
BlockGradients ring_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient) {
  QueriesBackward backward(call, kept, gradient, call.queries.held_by(call.rank()));
  const std::vector<std::vector<int64_t>> shapes{kept.key.sizes().vec(), kept.value.sizes().vec()};
  const auto label = label_of(call, "gradients of keys and values", {kept.key, kept.value});
  auto sums = at::zeros({kept.key.numel() + kept.value.numel()}, kept.key.options().dtype(wide_dtype(kept.key.scalar_type())));
  for_each_part(call, kept.key, kept.value, [&](const at::Tensor& key, const at::Tensor& value, int64_t owner) {
    const auto parts = unpacked(sums, shapes);
    backward.see(key, value, call.keys.held_by(owner), parts[0], parts[1]);
    if (call.ranks() > 1) sums = Rotation(call, sums, label).wait();
  });
  const auto parts = unpacked(sums, shapes);
  const auto dtype = kept.key.scalar_type();
  return {backward.query_gradient(), parts[0].to(dtype), parts[1].to(dtype)};
}

} // namespace tessera::internal
