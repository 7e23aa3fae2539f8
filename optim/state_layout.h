#pragma once

namespace tessera {

/// The layout of a tensor of optimizer state for a sharded parameter.
enum class StateLayout {
  kAsParameter, ///< of the parameter's shape, and sharded like it
  kReplicated,  ///< of any shape: a DTensor on the parameter's mesh that every rank holds whole
  kByRank,      ///< [ranks, …]: a row of each rank of the parameter's mesh, a DTensor that is split between them along dim 0
  kPlain,       ///< of any shape: a plain tensor, the same on every rank
};

} // namespace tessera
