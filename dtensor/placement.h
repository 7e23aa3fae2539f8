#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <c10/util/SmallVector.h>
#include <tessera/dtensor/rank_values.h>

namespace tessera {

/// Every rank of the mesh dim holds the whole tensor.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// Tensor dim `dim` is split as torch.chunk splits: ceil(n / ranks) each, trailing ranks less or nothing.
/// A negative dim counts from the end; a Spec holds it normalized.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// The leading tensor dims 0..`dim`, taken as one flattened dim, are split by `extents` (one a rank, 0 and "all" included).
/// The local tensor has shape [extents[rank], sizes after `dim`...]; for dim 0 that is a range of rows. (veScale's RaggedShard.)
/// Where mesh dims before it split these dims, it splits the part that they leave. The extents are those of the largest part,
/// that of the first ranks; a smaller part ends earlier, so that the ranks behind its end have less or nothing.
struct RaggedShard {
  int64_t dim = 0;
  RankValues extents;
  bool operator==(const RaggedShard&) const = default;
};

/// Tensor dim `dim` is cut into `split_factor` chunks, and each chunk is split over the ranks as Shard splits; a rank's parts lie
/// one after another in its local tensor. Beside Shard(dim) on an inner mesh dim of `split_factor` ranks it says that the inner
/// mesh dim split first, as tensor parallelism does under FSDP. (DTensor: _StridedShard.)
struct StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1; ///< positive; a Spec holds Shard in place of 1
  bool operator==(const StridedShard&) const = default;
};

/// Every rank holds a full-shape tensor; the value is their reduction. `kNorm` is the p-norm of the ranks' values. `kMask`,
/// printed as MaskPartial(), is the sum of tensors of which at most one differs from zero at each element, as a look-up in a
/// table that is split by rows makes them. (DTensor: _MaskPartial, which applies its mask in the reduction.)
struct Partial {
  enum class Op { kSum, kAvg, kMin, kMax, kProduct, kNorm, kMask };
  Op op = Op::kSum;
  double norm_p = 2.0; ///< for kNorm: finite and positive; ignored otherwise (a Spec holds 2)
  bool operator==(const Partial&) const = default;
};

using Placement = std::variant<Replicate, Shard, RaggedShard, Partial, StridedShard>;
/// One placement a mesh dim.
using Placements = c10::SmallVector<Placement, 2>;

inline bool is_replicate(const Placement& placement) { return std::holds_alternative<Replicate>(placement); }
inline bool is_partial(const Placement& placement) { return std::holds_alternative<Partial>(placement); }
/// A Partial that reduces by a p-norm: its parts have no sign.
inline bool is_norm(const Placement& placement) {
  const auto* partial = std::get_if<Partial>(&placement);
  return partial && partial->op == Partial::Op::kNorm;
}
inline bool is_strided(const Placement& placement) { return std::holds_alternative<StridedShard>(placement); }
/// Shard, RaggedShard or StridedShard: each rank holds a part of the elements.
inline bool is_sharded(const Placement& placement) { return !is_replicate(placement) && !is_partial(placement); }

/// True when `placement` splits tensor dim `dim` (for RaggedShard: any of its leading dims).
bool shards_dim(const Placement& placement, int64_t dim);
/// The first tensor dim that both split.
std::optional<int64_t> shared_dim(const Placement& a, const Placement& b);
/// True if one tensor may have `outer` and `inner` on two mesh dims, the first before the second: nothing splits the dims of a
/// RaggedShard once more, and all reductions are the same.
bool may_coexist(const Placement& outer, const Placement& inner);
/// True if two mesh dims may reduce one tensor by `a` and `b`, in any order: equal reductions, or a sum and a MaskPartial.
bool reduce_together(const Partial& a, const Partial& b);
/// True for a MaskPartial `from` and a sum `to`: the same local tensors mean the same value.
bool same_value(const Placement& from, const Placement& to);
/// `placements` with Replicate for each Partial: the placements of a gradient of such a tensor (DTensor).
Placements replicate_partial(Placements placements);
size_t hash_value(const Placement& placement);

/// "Replicate()", "Shard(0)", "RaggedShard(0, [3, 2])", "StridedShard(0, 2)", "Partial(sum)", "Partial(norm 2)",
/// "MaskPartial()".
std::string to_string(const Placement& placement);
/// "(Shard(0), Replicate())".
std::string to_string(const Placements& placements);

/// The placement that `to_string` writes as `text`; blanks between its parts are skipped. An error says where `text` is wrong.
Placement parse_placement(std::string_view text);
/// The placements that `to_string` writes as `text`.
Placements parse_placements(std::string_view text);

} // namespace tessera
