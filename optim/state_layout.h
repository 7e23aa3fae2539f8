#pragma once

namespace tessera {

/// How an optimizer's state tensor lies beside a sharded parameter.
enum class StateLayout {
  kAsParameter, ///< of the parameter's shape, and sharded as it is
  kReplicated,  ///< of any shape: a DTensor on the parameter's mesh that every rank holds whole
  kPlain,       ///< of any shape: a plain tensor, the same on every rank
};

} // namespace tessera
