#pragma once

// Internal: what the touch dispatch needs to know of an operator.

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

namespace tessera::fsdp_internal {

/// One argument of tensor or tensor-list type.
struct TensorArgument {
  size_t index;
  bool is_list;
  bool is_written;
  bool keeps_dtype; ///< a running statistic: updated in place though the schema declares no alias
};

struct OperatorTraits {
  std::vector<TensorArgument> tensors = {};
  bool is_metadata_only = false; ///< reads no element: detach, requires_grad_, zeros_like, …
  bool returns_alias = false;    ///< the first output is a view of an argument
  bool converts = false;         ///< Tensor::to
  bool replaces_data = false;    ///< the only dispatched step of Tensor::set_data, which Module::to uses
  bool replaces_storage = false; ///< set_, which torch::load uses
  bool reshapes = false;         ///< in place: t_, squeeze_, resize_, …
  bool renormalizes = false;     ///< rewrites the rows of an embedding that this rank's batch reads (max_norm)
};

/// The traits of `op`, from its schema; computed once a thread.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

} // namespace tessera::fsdp_internal
