#pragma once

// Internal: ways to write a Factorization down.

#include <string_view>

#include <tessera/dtensor/rules/rule.h>

namespace tessera::internal::rules {

/// The broadcast shape of `call.tensors[from..)`; an error that names the operator when they do not broadcast.
std::vector<int64_t> broadcast_sizes(const OpCall& call);

/// Dims of a tensor of `sizes` that is broadcast to `whole` (aligned at the right); a dim of size 1 that is stretched has no
/// factor.
TensorDims broadcast_dims(const std::vector<int64_t>& sizes, const TensorDims& whole);

/// Every tensor broadcast against the others, every output of that shape: an elementwise operator.
Factorization pointwise_factors(const OpCall& call);
/// Runs it on the locals. A memory format is one of all dims: where a RaggedShard merges some, they are row-major.
void run_in_format(const LocalCall& call);
/// Does what `pointwise_factors` does, with `flows`.
Factorize elementwise(absl::InlinedVector<PartialFlow, 2> flows);

/// All arguments and results are whole.
Factorization whole_factors(const OpCall& call);
/// Keeps tensors whole for an operator without a rule: an error where its kernel would update a copy of running statistics.
Factorization whole_without_rule(const OpCall& call);

/// "mk,kn->mn": a letter is a factor; one that the output lacks is summed. `additive` inputs are broadcast to the output and
/// added.
Factorization einsum_factors(const OpCall& call, std::string_view equation, IndexSet additive = {});

/// A fresh factor for each dim of `sizes`.
TensorDims fresh_dims(Factorization& factors, const std::vector<int64_t>& sizes);

/// No dim of `sizes` is split.
TensorDims whole_dims(const std::vector<int64_t>& sizes);

/// Input 0 with a factor a dim, no output yet; the other inputs without factors.
Factorization first_input_factors(const OpCall& call);

/// Partial inputs flow to the outputs: `inputs` with any of `ops`.
constexpr PartialFlow flow(IndexSet inputs, OpSet set) { return {inputs, set}; }

/// The reductions that a cast keeps: all without one, sums between floating-point types, and the order of values where none wraps
/// around.
inline OpSet kept_by_cast(at::ScalarType from, at::ScalarType to) {
  if (from == to) return kAllOps;
  if (at::isFloatingType(from) && at::isFloatingType(to)) return kScaleOps | kOrderOps;
  return at::isFloatingType(to) || from == at::kBool ? kOrderOps : OpSet{};
}

/// Whether any placement shards, for a PlacementMap.
bool any_sharded(const Placements& placements);
/// The placement that gives the ranks these extents of leading dims 0..dim: Shard(0) where they are torch.chunk's.
Placement from_extents(int64_t dim, const std::vector<int64_t>& extents);

/// Input 1, cast to the type of input 0, takes its place.
Factorization copy_factors(const OpCall& call);

} // namespace tessera::internal::rules
