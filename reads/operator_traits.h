#pragma once

// Internal: what the dispatch of reads needs to know of an operator.

#include <optional>

#include <tessera/dtensor/calls/call_schema.h>

namespace tessera::internal {

/// Operators that a sharded parameter among the arguments has handled in a way of their own.
enum class Special {
  kNone,
  kConverts,        ///< Tensor::to
  kReplacesData,    ///< the only dispatched step of Tensor::set_data, which Module::to uses
  kReplacesStorage, ///< set_, which torch::load uses
  kReshapes,        ///< in place: t_, squeeze_, resize_, …
  kRenormalizes     ///< rewrites the rows of an embedding that this rank's batch reads (max_norm)
};

struct OperatorTraits : dispatch::CallSchema {
  Special special = Special::kNone;
  absl::InlinedVector<size_t, 4> written_undeclared = {}; ///< positions: written in place though the schema declares no alias
  bool is_metadata_only = false;                          ///< reads no element: detach, requires_grad_, zeros_like, …
  bool returns_alias = false;                             ///< the first output is a view of an argument
  bool returns_argument = false;  ///< an output may be an argument or a view of one, though the schema declares no alias
  bool writes_at_indices = false; ///< in place, at those that several indices name, which each rank does to its part: index_put_
  bool is_composite = false;      ///< made of other operators, which the dispatch of reads sees one by one
  std::optional<size_t> storage_offset = {}; ///< index of the argument of that name: as_strided, as_strided_scatter, …
};

/// The traits of `op`, kept for the life of the process.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

} // namespace tessera::internal
