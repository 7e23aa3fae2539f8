#pragma once

#include <optional>

#include <tessera/mixed_precision/policy.h>

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

/// Options of `fully_shard`; the defaults are FSDP2's.
struct FullyShardOptions {
  /// Free the unsharded parameters between forward and backward. Unset: true, but false for the root module.
  std::optional<bool> reshard_after_forward;
  MixedPrecisionPolicy mixed_precision;
  BufferLayout layout = BufferLayout::kRagged;
  InitialWeights initial_weights = InitialWeights::kCheck;
};

} // namespace tessera
