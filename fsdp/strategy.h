#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Which ranks keep what of a model (ZeRO, arXiv:1910.02054; for the last row ZeRO++, arXiv:2306.10209, and MiCS). The names are
/// those of FSDP and ZeRO.
enum class Strategy {
  kNoShard,      ///< everything everywhere, gradients all-reduced (DDP; FSDP2: replicate)
  kZero1,        ///< ZeRO-1: the optimizer's state is sharded
  kZero2,        ///< ZeRO-2: the gradients as well (FSDP1: SHARD_GRAD_OP)
  kFullShard,    ///< ZeRO-3: the parameters as well (FSDP2: fully_shard)
  kHybridShard,  ///< full sharding inside the second mesh dim, replicas along the first (FSDP2: HSDP)
  kHierarchical, ///< parameters sharded inside the second mesh dim alone, gradients and optimizer state over all ranks
};

/// Which dims of a mesh are data-parallel, by their names. All others are foreign: tensor, context, expert or pipeline
/// parallelism has them, and each of their ranks shards its own parameters. Several dims count as one.
struct DataParallelDims {
  std::vector<std::string> outer; ///< between groups of ranks; empty for a strategy that has no entry for them
  std::vector<std::string> inner; ///< inside a group
};

/// Whether a state is split over the ranks of a mesh dim, or whole on each of them.
struct ShardedStates {
  bool parameters, gradients, optimizer_state;
  friend bool operator==(const ShardedStates&, const ShardedStates&) = default;
};

/// One row of the table that a strategy is.
///
/// Parameters that are whole along a dim stay gathered from one optimizer step to the next. Gradients that are whole are not
/// communicated before the last backward of an accumulation (`set_is_last_backward`). A state that is split along the outer dim
/// too is gathered, and reduced, first inside the groups of the inner dim.
struct StrategyRow {
  Strategy strategy;
  std::string_view name;
  std::optional<ShardedStates>
      outer;           ///< along the outer dims (between nodes), by default the first of two; unset: there are none
  ShardedStates inner; ///< along the inner dims (inside a node), by default the last
};

inline constexpr std::array<StrategyRow, 6> kStrategies{{
    {Strategy::kNoShard, "no-shard", std::nullopt, {false, false, false}},
    {Strategy::kZero1, "zero-1", std::nullopt, {false, false, true}},
    {Strategy::kZero2, "zero-2", std::nullopt, {false, true, true}},
    {Strategy::kFullShard, "full", std::nullopt, {true, true, true}},
    {Strategy::kHybridShard, "hybrid", ShardedStates{false, false, false}, {true, true, true}},
    {Strategy::kHierarchical, "hierarchical", ShardedStates{false, true, true}, {true, true, true}},
}};

/// The row of `strategy`.
constexpr const StrategyRow& row_of(Strategy strategy) { return kStrategies[static_cast<size_t>(strategy)]; }

} // namespace tessera
