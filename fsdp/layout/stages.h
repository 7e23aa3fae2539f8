#pragma once

// Internal: the collectives that a group's gather and its reduction consist of.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <tessera/collectives/communicator.h>
#include <tessera/fsdp/layout/mesh_roles.h>
#include <tessera/fsdp/options.h>

namespace tessera::internal {

/// One collective of a gather or a reduction.
struct Stage {
  enum class Kind { kAllGather, kReduceScatter, kAllReduce };
  /// What stays of it for the gathers or backwards that follow.
  enum class Kept {
    kNothing,
    kUntilWritten,   ///< what it gathered, until the shards are written: from one optimizer step to the next
    kAfterForward,   ///< after a forward a part of the unsharded parameters for each of its ranks: it makes the whole of these
                     ///< parts
    kUntilAllReduce, ///< what it is to reduce, in backwards without an all-reduce (`set_requires_all_reduce`)
  };

  Kind kind;
  CommunicatorPtr communicator; ///< null for a gather of one rank
  Kept kept = Kept::kNothing;

  int ranks() const { return communicator ? communicator->size() : 1; }
  int rank() const { return communicator ? communicator->rank() : 0; }
};

/// What a group calls, as the strategy's row and `reshard_after_forward` say.
///
/// | | gathers, from the outermost to the innermost | reductions, the other way |
/// |---|---|---|
/// | no-shard | one rank | all-reduce |
/// | ZeRO-1, ZeRO-2 | all, kept until written | reduce-scatter |
/// | full | all | reduce-scatter |
/// | a number of ranks after forward | all; these ranks, kept after forward | reduce-scatter |
/// | hybrid | inner | reduce-scatter inside, all-reduce between |
/// | hierarchical | outer, kept until written; inner | reduce-scatter inside, reduce-scatter between |
///
/// A gather starts with the last stage whose input was kept, or with the first. What one stage gathers is the input of the next,
/// unless that one starts from what is kept after a forward. Gathers and reductions use communicators of their own, so that they
/// overlap, or share one.
struct Stages {
  std::vector<Stage> gathers;    ///< one at least
  std::vector<Stage> reductions; ///< those of more than one rank

  /// Whether gather `stage` starts from what the one before it gathers.
  bool follows(size_t stage) const { return stage < gathers.size() && gathers[stage].kept != Stage::Kept::kAfterForward; }
  /// The last of the gathers that follow one another: it makes the whole.
  size_t innermost() const { return gathers.size() - (has_after_forward() ? 2 : 1); }
  const Stage& inner_gather() const { return gathers[innermost()]; }
  bool has_after_forward() const { return gathers.back().kept == Stage::Kept::kAfterForward; }
  /// Whether a gather communicates at all.
  bool communicates() const;

  /// The communicator of the reduction inside, which every backward calls that reduces at all; null where there is none.
  const CommunicatorPtr& reduce_scatter() const;
  /// Whether the last reduction may be left to a later backward.
  bool may_wait() const { return !reductions.empty() && reductions.back().kept == Stage::Kept::kUntilAllReduce; }
  /// How many ranks' gradients are added in all.
  int reducing_ranks() const;
  /// Whether the reductions average this dtype as well as a sum that is divided after it.
  bool averages(at::ScalarType dtype) const;
};

/// An error where `after_forward` does not fit the strategy, or its ranks do not divide those of the shard axis.
void check_after_forward(const MeshRoles& roles, const std::optional<ReshardAfterForward>& after_forward);

/// Connects the ranks of each stage. Every rank of the roles' mesh calls it. An error of `check_after_forward`.
Stages connect_stages(const MeshRoles& roles, const std::optional<ReshardAfterForward>& after_forward, CommunicatorUse use);

/// "unset", "true", "false" or a number of ranks.
std::string text_of_reshard_after_forward(const std::optional<ReshardAfterForward>& option);

} // namespace tessera::internal
