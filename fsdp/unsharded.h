#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// The whole of a sharded parameter as a plain tensor, in the dtype that forward computes in, for code that needs raw pointers.
///
/// Gathers the parameter's group where that is not unsharded; every rank of the shard dim calls it then. In grad mode a gradient
/// through the result reaches the parameter. The memory lives until the group is resharded: by the first read of a group that is
/// neither above nor below it, by `FSDPModule::reshard`, or by the end of backward; after that, an operator that reads the result
/// gathers it again, and a raw pointer dangles. Read only: a write through a raw pointer is lost (use `parameter.copy_(full)`).
/// A tensor that is no sharded parameter is returned as it is. An error for a detached copy that requires a gradient of its own,
/// in grad mode.
at::Tensor unsharded(const at::Tensor& parameter);

} // namespace tessera
