#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

/// The whole of a sharded parameter as a plain tensor, in the dtype that forward computes in, for code that needs raw pointers.
/// Of one that was a DTensor over other dims of the mesh: that DTensor.
///
/// Gathers the parameter's group if it is not unsharded; every rank of the shard dim calls it then. In grad mode a gradient
/// through the result reaches the parameter. The memory lives until the group is resharded: by the first read of a group that is
/// neither above nor below it, by `FSDPModule::reshard`, or by the end of backward. After that, an operator that reads the result
/// gathers it again, but a raw pointer dangles. Read only: a write through a raw pointer is lost (use `parameter.copy_(full)`).
/// Of a view that was taken without grad mode it returns the view of the whole. Any other tensor is returned unchanged. In grad
/// mode, an error for a detached copy that requires its own gradient.
at::Tensor unsharded(const at::Tensor& parameter);

} // namespace tessera
