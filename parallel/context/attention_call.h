#pragma once

// Internal: a call of attention on a split sequence, on this rank.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/parallel/context/block_kernels.h>
#include <tessera/parallel/context/sequence_parts.h>
#include <tessera/parallel/context_attention.h>

namespace tessera::internal {

/// What all ranks agree on, beside the parts.
struct AttentionCall : torch::CustomClassHolder {
  CommunicatorPtr communicator;
  ContextParallel scheme = ContextParallel::kAllGather;
  SplitSequence queries, keys;
  at::Tensor mask; ///< undefined, or as in ContextAttentionOptions, plain and of 4 dims
  std::vector<int64_t> documents;
  bool is_causal = false;
  double scale = 1;

  int ranks() const { return communicator->size(); }
  int rank() const { return communicator->rank(); }
};

/// What backward needs; Ulysses keeps whole sequences of some heads.
struct KeptAttention {
  at::Tensor query, key, value, out, lse;
};

struct AttentionResult {
  at::Tensor out;
  KeptAttention kept;
};

/// Attention of some of the queries, whose keys come one part after another: blocks are merged in fp32 (fp64 for such queries).
class QueriesForward {
 public:
  /// `query` [b, h, n, e] holds `held`; of `value_features` will be the values.
  QueriesForward(const AttentionCall& call, at::Tensor query, std::vector<HeldRange> held, int64_t value_features);
  /// The queries see those keys of `key` and `value` that are `held` there.
  void see(const at::Tensor& key, const at::Tensor& value, const std::vector<HeldRange>& held);
  /// In memory the heads of a position are neighbours, as the next layer wants them.
  at::Tensor out() const { return out_.to(query_.scalar_type()); }
  const at::Tensor& lse() const { return lse_; }

 private:
  void merge(int64_t offset, const BlockResult& result);
  const AttentionCall& call_;
  at::Tensor query_;
  std::vector<HeldRange> held_;
  at::Tensor out_, lse_;
};

/// Gradients of the same.
class QueriesBackward {
 public:
  QueriesBackward(const AttentionCall& call, const KeptAttention& kept, at::Tensor gradient, std::vector<HeldRange> held);
  /// Adds to the gradients of these keys and values, which are as large, in fp32 (fp64).
  void see(const at::Tensor& key, const at::Tensor& value, const std::vector<HeldRange>& held, const at::Tensor& key_gradient,
           const at::Tensor& value_gradient);
  at::Tensor query_gradient() const { return query_gradient_.to(query_.scalar_type()); }

 private:
  const AttentionCall& call_;
  at::Tensor query_, out_, lse_, gradient_;
  std::vector<HeldRange> held_;
  at::Tensor query_gradient_;
};

/// The dtype in which blocks of tensors of `dtype` are merged.
inline at::ScalarType wide_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

AttentionResult all_gather_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value);
BlockGradients all_gather_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient);

AttentionResult ring_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);
BlockGradients ring_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient);

AttentionResult ulysses_forward(const AttentionCall& call, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value);
BlockGradients ulysses_backward(const AttentionCall& call, const KeptAttention& kept, const at::Tensor& gradient);

} // namespace tessera::internal
