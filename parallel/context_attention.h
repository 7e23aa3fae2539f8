#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// How attention sees the whole sequence where each rank has a part of it. docs/context_parallel.md says what each sends.
enum class ContextParallel : uint8_t {
  kAllGather, ///< keys and values are gathered
  kRing,      ///< keys and values go round from rank to rank
  kUlysses,   ///< the ranks change parts of the sequence for parts of the heads, and back: the heads must divide
};

const char* to_string(ContextParallel scheme);

struct ContextAttentionOptions {
  ContextParallel scheme = ContextParallel::kAllGather;
  /// Bool (true: may be seen) or added to the scores; [length or 1, key length or 1], or with batch and heads before them, each
  /// of size 1 or whole. Plain, or a replicated DTensor: of the whole sequence, in the order of its positions, the same on every
  /// rank, with or without the padded ones. A DTensor that is split along queries or keys: as these are. It needs no gradient.
  std::optional<at::Tensor> mask = std::nullopt;
  bool is_causal = false; ///< a query sees the keys at its own position and before; queries and keys are of one length
  std::optional<double> scale = std::nullopt; ///< of the scores; 1 / sqrt(features) by default
  /// Where the documents of a packed sequence begin, and the end of the last: 0 = d0 ≤ d1 ≤ … = the length without padding. A
  /// query sees keys of its own document. Empty: one document.
  std::vector<int64_t> cu_seqlens = {};
};

/// softmax(scale · query · keyᵀ + mask) · value of a sequence that is split over the ranks of a mesh dim.
///
/// query [batch, heads, length, features], key and value [batch, key heads, key length, features] are DTensors that lie alike,
/// Shard(-2) on one mesh dim of a mesh of `split_sequence` (on any other mesh a Shard(-2) counts as contiguous) and equally split
/// or replicated along batch and heads on others. The heads may be a multiple of the key heads (grouped queries); heads and batch
/// may be left out. The result lies as the query does. Padded positions are no keys, and as queries have 0. A row that sees no
/// key is 0. Blocks are merged in fp32. Differentiable once. Every rank of the mesh calls it.
///
/// Errors: parts of different lengths, lengths that do not divide, heads that Ulysses cannot divide (with the numbers of ranks
/// that fit), a mask that does not fit or requires a gradient.
at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const ContextAttentionOptions& options = {});

/// Does the same with plain tensors, each rank's part, over the ranks of `mesh`. This has one dim: that of `split_sequence`, or
/// any other for contiguous parts. The parts may also be DTensors of other ranks, as tensor parallelism makes them: split along
/// heads, of which each rank then has some, or whole. Where the key heads are whole because they are fewer than those ranks, each
/// rank takes the ones of its query heads.
at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const DeviceMesh& mesh, const ContextAttentionOptions& options = {});

namespace internal {
struct CarriedScope;
}

/// While it lives, `scaled_dot_product_attention` of this thread on split sequences is `context_parallel_attention` with the
/// scheme, in unmodified modules too: where query, key and value are DTensors, Shard(-2) on a mesh of `split_sequence`. There it
/// is all-gather without a scope. With a mesh of one dim, also where they are plain, or DTensors of tensor parallelism over other
/// ranks: then each rank's part. Scopes nest, the innermost counts; a second run of `recompute` is in the scope of the first one.
/// In a scope with a mesh, recurrent layers and convolutions of such tensors are errors: each rank would see its own part alone.
/// Attention dropout is an error.
class ContextParallelScope {
 public:
  explicit ContextParallelScope(ContextParallel scheme);
  ContextParallelScope(ContextParallel scheme, const DeviceMesh& mesh);
  ~ContextParallelScope();
  ContextParallelScope(const ContextParallelScope&) = delete;
  ContextParallelScope& operator=(const ContextParallelScope&) = delete;

 private:
  std::shared_ptr<const internal::CarriedScope> before_;
};

} // namespace tessera
