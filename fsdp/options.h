#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mixed_precision/policy.h>
#include <tessera/offload/offload_policy.h>

namespace tessera {

/// How a group's parameters lie in its buffers.
enum class BufferLayout {
  kRagged,       ///< whole parameters one after another; the all-gather's output is the unsharded storage (placement RaggedShard)
  kPerParameter, ///< every parameter split by Shard(0) as in FSDP2; one copy after the all-gather
};

/// What a rank does when its initial weights differ from rank 0's.
enum class InitialWeights {
  kCheck,     ///< an error on every rank, from a checksum
  kBroadcast, ///< rank 0's weights are used
  kUnchecked, ///< every rank keeps its part of its own weights
};

/// The communicators of a model's collectives along one mesh dim.
enum class CommunicatorUse {
  kSeparate, ///< one for gathers and one for reductions, which overlap
  kShared, ///< one for both, which run in turn: half of what NCCL holds for them. Ranks that use different parameters call these
           ///< in different orders, which is an error on all
};

/// What is left of the unsharded parameters between a forward and its backward: all of them, this rank's shard, or, of a number
/// of ranks, this rank's part among as many neighbours on the shard dim, so that the backward gathers between these alone (FSDP2:
/// `Union[bool, int]`; ZeRO++'s secondary partition). It takes 1/ranks of the parameters until the backward is over. 1 is false.
class ReshardAfterForward {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): the values that an option takes
  constexpr ReshardAfterForward(bool reshards) : reshards_(reshards) {}
  template <std::integral Integer>
  requires(!std::same_as<Integer, bool>)
      // NOLINTNEXTLINE(google-explicit-constructor)
      constexpr ReshardAfterForward(Integer ranks)
      : reshards_(ranks != 1), ranks_(ranks) {}

  constexpr explicit operator bool() const { return reshards_; }
  /// Unset for true and false.
  constexpr std::optional<int64_t> ranks() const { return ranks_; }
  friend bool operator==(const ReshardAfterForward&, const ReshardAfterForward&) = default;

 private:
  bool reshards_;
  std::optional<int64_t> ranks_;
};

/// How a parameter is split over the shard dim: by Shard(d), or by RaggedShard, of which each extent is a rank's. Nothing leaves
/// it to the layout. The name is that from the module given to `fully_shard`. The same on every rank. (FSDP2:
/// `shard_placement_fn`.)
using ShardPlacementFn = std::function<std::optional<Placement>(const std::string& name, const at::Tensor& parameter)>;

/// Options of `fully_shard`; the defaults are FSDP2's.
struct FullyShardOptions {
  /// Which ranks keep what. Unset: full sharding on a 1-D mesh, hybrid on a 2-D one.
  std::optional<Strategy> strategy;
  /// Free the unsharded parameters between forward and backward. Unset: true, but false for the root module and where the
  /// strategy keeps parameters whole.
  std::optional<ReshardAfterForward> reshard_after_forward;
  MixedPrecisionPolicy mixed_precision;
  BufferLayout layout = BufferLayout::kRagged;
  InitialWeights initial_weights = InitialWeights::kCheck;
  /// A group with a parameter that it names a placement for is laid out per parameter: kPerParameter for the others.
  ShardPlacementFn shard_placement_fn = nullptr;
  /// What is sent of a parameter, and how the parameter is made of it. A group with such a parameter is laid out per parameter.
  /// Not for a strategy that gathers nothing, nor beside a number of ranks for `reshard_after_forward`. A write to an unsharded
  /// parameter that has an extension is an error.
  GatherExtensionFn gather_extension_fn = nullptr;
  /// Without sharding, gradients are all-reduced in buckets of about so many bytes of parameters, so that those of the last
  /// layers are on their way while a backward computes the first (DDP: `bucket_cap_mb`). A backward that gives one of them a
  /// gradient reduces all: other ranks may use other parameters. Other strategies reduce a call's parameters together.
  int64_t bucket_bytes = int64_t{25} << 20;
  /// Of the collectives of these parameters. The same on every rank.
  CommunicatorUse communicators = CommunicatorUse::kSeparate;
  /// Where this rank's shards, reduced gradients and optimizer state lie. The kind of memory is the same on every rank.
  OffloadPolicy offload = {};
  /// Parameters that this call leaves as they are: neither sharded, nor moved to the mesh's device, nor reduced. Each rank trains
  /// its own, without a warning, unless the program reduces their gradients. Those of other modules are passed over, so that one
  /// list serves the calls of a whole model; a call without it takes them.
  std::vector<at::Tensor> ignored_params = {};
};

} // namespace tessera
