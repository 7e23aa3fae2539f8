#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/dtensor/placement.h>
#include <tessera/fsdp/communication.h>
#include <tessera/fsdp/gather_extension.h>
#include <tessera/fsdp/strategy.h>
#include <tessera/mesh/device_mesh.h>
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
  kBroadcast, ///< rank 0's weights and buffers are used (DDP: at its construction; FSDP1: sync_module_states)
  kUnchecked, ///< every rank keeps its part of its own weights
};

/// The communicators of a model's collectives along one mesh dim.
enum class CommunicatorUse {
  kSeparate, ///< one for gathers and one for reductions, which overlap
  kShared, ///< one for both, which run in turn. It takes half of NCCL's memory for them. Ranks that use different parameters call
           ///< gathers and reductions in different orders, which is an error on all ranks
};

/// What a rank keeps of the unsharded parameters between a forward and its backward. true: its shard. false: all of them. A
/// number of ranks: its part of the parameters, split over that many neighbouring ranks on the shard dim, so that the backward
/// gathers only between these (FSDP2: `Union[bool, int]`; ZeRO++'s secondary partition). The part takes 1/ranks of the parameters
/// until the backward is over. 1 is false.
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

/// Says where a parameter of a `fully_shard` call lies. It is made of a placement, or of `std::nullopt`, which leaves it to the
/// layout.
struct ChosenPlacement {
  template <typename Chosen>
  requires std::convertible_to<Chosen, std::optional<Placement>>
  // NOLINTNEXTLINE(google-explicit-constructor): the values that a function returns
  ChosenPlacement(Chosen&& chosen, DeviceMesh on = {}) : placement(std::forward<Chosen>(chosen)), mesh(std::move(on)) {}

  /// Along the shard dim: Shard(d), or a RaggedShard with an extent for each rank, or Replicate: every rank has it whole, and its
  /// gradient is averaged by an all-reduce. For small parameters, which are then not gathered.
  std::optional<Placement> placement;
  /// On which ranks, such as those with the same experts; undefined: those of the call. 1-D, or 2-D to replicate over its first
  /// dim, as for `fully_shard`, or as the option `strategy` says. (FSDP2: ShardPlacementResult.)
  DeviceMesh mesh;
};

/// Chooses where a parameter lies. The name is relative to the module given to `fully_shard`. It returns the same on every rank
/// of the call. Parameters that are replicated, and those of each other mesh, have buffers and collectives of their own; they are
/// gathered, freed and reduced with the others of the call. (FSDP2: `shard_placement_fn`.)
using ShardPlacementFn = std::function<ChosenPlacement(const std::string& name, const at::Tensor& parameter)>;

/// A `shard_placement_fn` that does not split matrices, for optimizers that need whole ones (Muon, Shampoo). Each of `parameters`
/// with two dims or more is stored on one of the `ranks` of the shard dim: one after another, from the largest on, on the rank
/// that has least so far. The layout decides about the others. Give it the parameters of one `fully_shard` call, because a
/// group's gather takes the same size from each rank, that of the fullest. Equal shapes in the same order give the same result on
/// all ranks. On a 2-D mesh, `ranks` is the size of its last dim.
ShardPlacementFn whole_on_one_rank(const std::vector<at::Tensor>& parameters, int64_t ranks);

/// Options of `fully_shard`. The defaults are FSDP2's, except three: `layout` (FSDP2 lays parameters out as kPerParameter),
/// `initial_weights` (FSDP2 does not compare the ranks' weights) and `communicators` (FSDP2 uses one process group).
struct FullyShardOptions {
  /// Which ranks keep what. Unset: full sharding on a 1-D mesh, hybrid on a 2-D one, or where
  /// `data_parallel_dims` names outer dims.
  std::optional<Strategy> strategy;
  /// Which dims of the mesh the strategy is for. Unset: all of a mesh with one dim or two, the last of which is the inner one.
  std::optional<DataParallelDims> data_parallel_dims;
  /// Free the unsharded parameters between forward and backward. Unset: true, but false for the root module and where the
  /// strategy keeps parameters whole.
  std::optional<ReshardAfterForward> reshard_after_forward;
  MixedPrecisionPolicy mixed_precision;
  BufferLayout layout = BufferLayout::kRagged;
  InitialWeights initial_weights = InitialWeights::kCheck;
  /// If it returns a Shard or a RaggedShard for some parameter of a group, the whole group is laid out as kPerParameter.
  ShardPlacementFn shard_placement_fn = nullptr;
  /// What is sent of a parameter, and how the parameter is built from it. A group with such a parameter is laid out as
  /// kPerParameter. An error with a strategy that gathers nothing, and with a number of ranks for `reshard_after_forward`. A
  /// write to an unsharded parameter that has an extension is an error.
  GatherExtensionFn gather_extension_fn = nullptr;
  /// Gathers and reductions in fewer bits. An error for a quantized gather with a strategy that gathers nothing, or of a call
  /// whose parameters have no floating-point numbers. A write to an unsharded parameter whose gather is quantized is an error.
  Communication communication = {};
  /// Without sharding, gradients are all-reduced in buckets of about this many bytes of parameters. So the gradients of the last
  /// layers are sent while the backward computes the first layers (DDP: `bucket_cap_mb`). If one bucket gets a gradient, all are
  /// reduced, because other ranks may use other parameters. Strategies that shard reduce all parameters of a call together.
  int64_t bucket_bytes = int64_t{25} << 20;
  /// Limits the bucket of the last parameters, whose gradients come first. Unset: as the others. A smaller one is sent sooner
  /// (DDP: 1 MiB).
  std::optional<int64_t> first_bucket_bytes = {};
  /// Whether gathers and reductions share a communicator. The same on every rank.
  CommunicatorUse communicators = CommunicatorUse::kSeparate;
  /// Where this rank's shards, reduced gradients and optimizer state lie. The kind of memory is the same on every rank.
  OffloadPolicy offload = {};
  /// Parameters that this call neither shards, nor moves to the mesh's device, nor reduces. Each rank trains its own copy,
  /// without a warning, unless the program reduces their gradients. Parameters of other modules are ignored, so that one list
  /// serves all calls of a model. A later call without the list takes them.
  std::vector<at::Tensor> ignored_params = {};
};

} // namespace tessera
