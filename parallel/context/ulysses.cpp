// The ranks change parts of the sequence with all heads for the whole sequence with some of the heads, and back.

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <tessera/parallel/context/part_exchange.h>

namespace tessera::internal {

namespace {

/// The heads of each rank, of a tensor [b, h, n, e].
std::vector<at::Tensor> split_heads(const AttentionCall& call, const at::Tensor& tensor) { return tensor.chunk(call.ranks(), 1); }

/// A tensor whose heads are split, and the sequence that it is of.
struct Exchanged {
  at::Tensor tensor;
  const SplitSequence& sequence;
};

/// This rank's heads of the whole sequences, without padding, of each rank's parts with all heads.
std::vector<at::Tensor> to_heads(const AttentionCall& call, const std::vector<Exchanged>& parts, const std::string& label) {
  std::vector<std::vector<at::Tensor>> by_rank(static_cast<size_t>(call.ranks()));
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& part : parts) {
    const auto heads = split_heads(call, part.tensor);
    shapes.push_back(heads[0].sizes().vec());
    for (size_t rank = 0; rank < by_rank.size(); ++rank) by_rank[rank].push_back(heads[rank]);
  }
  std::vector<at::Tensor> rows;
  for (const auto& heads : by_rank) rows.push_back(packed(heads));
  const auto received = exchanged(call, at::stack(rows), label);
  std::vector<std::vector<at::Tensor>> by_tensor(parts.size());
  for (int64_t rank = 0; rank < call.ranks(); ++rank) {
    const auto tensors = unpacked(received[rank], shapes);
    for (size_t i = 0; i < parts.size(); ++i) by_tensor[i].push_back(tensors[i]);
  }
  std::vector<at::Tensor> wholes;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& sequence = parts[i].sequence;
    wholes.push_back(whole_of(by_tensor[i], 2, sequence).narrow(2, 0, sequence.length_without_padding()).contiguous());
  }
  return wholes;
}

/// The inverse: this rank's parts with all heads. Padding is 0.
std::vector<at::Tensor> to_parts(const AttentionCall& call, const std::vector<Exchanged>& wholes, const std::string& label) {
  std::vector<at::Tensor> rows;
  std::vector<std::vector<int64_t>> shapes;
  for (int64_t rank = 0; rank < call.ranks(); ++rank) {
    std::vector<at::Tensor> parts;
    for (const auto& whole : wholes)
      parts.push_back(
          part_of(at::constant_pad_nd(whole.tensor, {0, 0, 0, whole.sequence.layout.padding}, 0), 2, whole.sequence, rank));
    shapes.clear();
    for (const auto& part : parts) shapes.push_back(part.sizes().vec());
    rows.push_back(packed(parts));
  }
  const auto received = exchanged(call, at::stack(rows), label);
  std::vector<std::vector<at::Tensor>> by_tensor(wholes.size());
  for (int64_t rank = 0; rank < call.ranks(); ++rank) {
    const auto tensors = unpacked(received[rank], shapes);
    for (size_t i = 0; i < wholes.size(); ++i) by_tensor[i].push_back(tensors[i]);
  }
  std::vector<at::Tensor> result;
  for (auto& tensors : by_tensor) {
    for (auto& heads : tensors) heads = heads.transpose(1, 2);
    result.push_back(at::cat(tensors, 2).transpose(1, 2)); // the heads of a position are neighbours in memory
  }
  return result;
}

/// The call for this rank's heads.
AttentionCall of_my_heads(const AttentionCall& call) {
  auto mine = call;
  if (call.mask.defined() && call.mask.size(1) > 1) mine.mask = split_heads(call, call.mask)[static_cast<size_t>(call.rank())];
  return mine;
}

} // namespace

AttentionResult ulysses_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value) {
  const auto wholes = to_heads(call, {{query, call.queries}, {key, call.keys}, {value, call.keys}},
                               label_of(call, "queries, keys and values", {query, key, value}));
  const auto mine = of_my_heads(call);
  QueriesForward forward(mine, wholes[0], call.queries.whole(), value.size(3));
  forward.see(wholes[1], wholes[2], call.keys.whole());
  const auto out = forward.out();
  return {to_parts(call, {{out, call.queries}}, label_of(call, "results", {query}))[0],
          {wholes[0], wholes[1], wholes[2], out, forward.lse()}};
}

BlockGradients ulysses_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient) {
  const auto whole = to_heads(call, {{gradient, call.queries}}, label_of(call, "gradients of results", {gradient}))[0];
  const auto mine = of_my_heads(call);
  QueriesBackward backward(mine, kept, whole, call.queries.whole());
  const auto options = kept.key.options().dtype(wide_dtype(kept.key.scalar_type()));
  const auto of_keys = at::zeros(kept.key.sizes(), options), of_values = at::zeros(kept.value.sizes(), options);
  backward.see(kept.key, kept.value, call.keys.whole(), of_keys, of_values);
  const auto dtype = kept.key.scalar_type();
  const auto parts = to_parts(
      call, {{backward.query_gradient(), call.queries}, {of_keys.to(dtype), call.keys}, {of_values.to(dtype), call.keys}},
      label_of(call, "gradients of queries, keys and values", {gradient}));
  return {parts[0], parts[1], parts[2]};
}

} // namespace tessera::internal
