#pragma once

// Internal: copies of state dicts in other places and layouts.

#include <functional>
#include <string>

#include <tessera/checkpoint/state_dict.h>

namespace tessera::internal {

/// What `read` gives on this rank. Every rank calls it: an error on any rank is an error on every rank, and names `step`.
StateDict read_on_all_ranks(const std::string& step, const std::function<StateDict()>& read);

/// A copy of `state`, without its bindings, as `options` (full_state_dict, cpu_offload, rank0_only) ask. Every rank calls it when
/// tensors are gathered.
StateDict copy_of(const StateDict& state, const StateDictOptions& options);

/// What `read` gives, or a copy of it where `options` ask for one. Every rank calls it when tensors are gathered.
StateDict read_with_options(const StateDictOptions& options, const std::function<StateDict()>& read);

/// The whole tensor, plain: gathered from a DTensor by every rank of its mesh, any other tensor itself. Outside autograd.
at::Tensor whole_tensor(const at::Tensor& tensor);

} // namespace tessera::internal
