#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera {

// The steps of a mixture of experts: which experts a token goes to, how it gets there, what they compute, and how it comes back.
// `MoE` (parallel/moe.h) is a module over them. Tokens are rows: [tokens, width], plain tensors.

namespace internal::experts {
struct TokenPlan;
}

/// What a router's logits become.
enum class RouterScore {
  kSoftmax, ///< over all experts
  kSigmoid, ///< of each expert by itself (arXiv:2412.19437)
};

/// How tokens choose experts.
struct RouteOptions {
  int64_t top_k = 2; ///< experts of a token
  RouterScore score = RouterScore::kSoftmax;
  /// The experts are so many groups of neighbours, and a token chooses among those of its best `top_groups` groups: those with
  /// the largest sum of their two best scores.
  int64_t groups = 1;
  int64_t top_groups = 1;
  bool renormalize = true; ///< the weights of a token sum to 1, before `scale`
  double scale = 1;        ///< of the weights
};

/// What a router decided.
struct Routing {
  at::Tensor scores;  ///< [tokens, experts], in fp32 or fp64; differentiable
  at::Tensor experts; ///< [tokens, top_k], int64: of a token the best first; -1 where the choice was dropped
  at::Tensor weights; ///< [tokens, top_k], of the experts' outputs; differentiable, 0 where the choice was dropped
  at::Tensor counts;  ///< [experts], int64: the tokens that chose each, those that were dropped too
};

/// Chooses experts by `logits` [tokens, experts], computed in fp32 or in the logits' fp64. `bias` [experts] is added to the
/// scores for the choice alone, not for the weights (arXiv:2408.15664). Among equal scores the expert with the lower number comes
/// first. A second run of `recompute` keeps the choice of the first. Local. Throws where top_k, the groups or the shapes do not
/// fit.
Routing route(const at::Tensor& logits, const RouteOptions& options = {}, const at::Tensor& bias = {});

/// Which choices go where an expert has too many.
enum class CapacityDrop {
  kLowestScore, ///< those with the smallest weights; among equal ones the later tokens
  kLastToken,   ///< those of the later tokens
};

/// The most tokens that an expert takes: ceil(factor × tokens × top_k / experts), of the tokens of all ranks of a mesh.
struct Capacity {
  double factor = 1.25;
  CapacityDrop drop = CapacityDrop::kLowestScore;
};

/// The routing without the choices that exceed the capacity. Tokens count in the order of the ranks of `mesh`, then of their
/// rows: so what is dropped does not depend on how many ranks there are. An undefined mesh is this rank alone. Every rank of it
/// calls this: it gathers [top_k × tokens] numbers of each, under kLastToken only [experts] of each. Throws unless the factor is
/// positive.
Routing limit_to_capacity(Routing routing, const Capacity& capacity, const DeviceMesh& mesh = {});

/// Tokens at the ranks of their experts.
struct Dispatched {
  at::Tensor tokens;           ///< [received, width]: those of this rank's first expert, then of its second, …
  std::vector<int64_t> counts; ///< the tokens of each of this rank's experts, of which some may have none
  std::shared_ptr<const internal::experts::TokenPlan> plan;
};

/// Sends each token to the ranks of the experts that it chose: of E experts, rank r of n has those from r·E/n on. Within an
/// expert, tokens lie in the order of their ranks and rows. Differentiable: the gradients of a token's copies are added in the
/// order of its choices. On a mesh of one rank, or an undefined one, nothing is sent.
///
/// Every rank of the 1-D mesh calls it, one without tokens too, as well as its backward. It sends E + n numbers, then at most
/// tokens · top_k · width elements, and waits on the host for the counts. An error on all ranks of the mesh where a score of one
/// is NaN, or n does not divide E.
Dispatched dispatch(const at::Tensor& tokens, const Routing& routing, const DeviceMesh& mesh = {});

/// Brings the experts' outputs [received, width] back to the ranks of the tokens: [tokens, width], the sum over each token's
/// choices, weighted, added in fp32 in the order of the choices, in the dtype of the outputs. A choice that was dropped adds
/// nothing. `beside` is computed while the outputs are on their way, and added where it is given. Every rank that called
/// `dispatch` calls it.
at::Tensor combine(const at::Tensor& outputs, const Dispatched& dispatched, const Routing& routing,
                   const std::function<at::Tensor()>& beside = nullptr);

/// A linear layer for each expert: `tokens` [received, in], of which the first counts[0] rows meet weight[0], and so on; `weight`
/// [experts, out, in], `bias` [experts, out] or undefined. Returns [received, out]. The weight may be one of `fully_shard` or of
/// `expert_parallel`: then [experts, …] are those of this rank. An expert without tokens gets a gradient of zeros. One kernel
/// (at::_grouped_mm) for fp32, bf16 and fp16 whose rows are multiples of 16 bytes, otherwise a product an expert.
at::Tensor grouped_linear(const at::Tensor& tokens, const std::vector<int64_t>& counts, const at::Tensor& weight,
                          const at::Tensor& bias = {});

/// What forward reads of a parameter [experts, …] that `expert_parallel` or `fully_shard` took, or neither: this rank's experts,
/// as a plain tensor; differentiable. For experts of a program's own. Ranks that shard it together call it together.
at::Tensor local_experts(const at::Tensor& parameter);

/// Tokens that are counted together in a loss.
struct TokenCounts {
  at::Tensor counts; ///< [experts], int64: the choices of each over all of these tokens
  double tokens = 0; ///< how many there are
  double ranks = 1;  ///< the number of ranks with a loss of their own (data ranks) among which these tokens are
};

/// The counts of this rank's tokens over the ranks of `mesh`, by one all-reduce; undefined: of this rank. Every rank of the mesh
/// calls it. `loss_ranks`: how many of these have a loss of their own; 0: all.
TokenCounts count_tokens(const Routing& routing, const DeviceMesh& mesh = {}, double loss_ranks = 0);

/// This rank's part of the auxiliary loss E · Σ_i P_i · c_i / (k · T²) (arXiv:2101.03961), times the ranks with a loss of their
/// own: the mean over these ranks is the loss of all tokens. P_i sums the scores of expert i, each token's divided by their sum,
/// c_i counts its tokens, T are all tokens. It is 1 where all is balanced. Without dims; differentiable in the scores.
at::Tensor load_balancing_loss(const Routing& routing, const TokenCounts& all);

/// The same of each sequence by itself, the mean over sequences: `tokens` / `sequences` neighbouring tokens are one. Local.
at::Tensor sequence_balancing_loss(const Routing& routing, int64_t sequences);

/// The sequences of this rank's tokens, of which other ranks may have parts too.
struct TokenSequences {
  int64_t count = 0;     ///< the same on all `ranks`
  at::Tensor of_token;   ///< [tokens], int64: from 0; undefined where neighbours are one, as many in each
  DeviceMesh ranks = {}; ///< those with parts of the same sequences; undefined: this one alone
  double loss_ranks = 1; ///< how many of these have a loss of their own
};

/// This rank's part of that loss where `ranks` have the tokens of a sequence together, times `loss_ranks`. Every one of them
/// calls it; one all-reduce of sequences · (experts + 1) counts.
at::Tensor sequence_balancing_loss(const Routing& routing, const TokenSequences& sequences);

/// This rank's part, alike, of the mean over all tokens of logsumexp(logits)² (arXiv:2202.08906), which keeps logits small.
at::Tensor router_z_loss(const at::Tensor& logits, const TokenCounts& all);

/// `output`, whose backward also runs that of `loss`, with the gradient `scale`: so a loss inside of a model needs no way to the
/// end of it. `loss` has no dims.
at::Tensor inject_loss(const at::Tensor& output, const at::Tensor& loss, double scale = 1);

} // namespace tessera
