#pragma once

// Internal: which buffers a function has written.

#include <ATen/core/Tensor.h>

#include <vector>

#include <tessera/activations/version_watch.h>

namespace tessera::internal {

/// For each of `buffers` whether it was written since its watch and its copy in `before` were made; perhaps true for one that
/// was not, but was written without a new version at an earlier call, as kernels write running statistics. Of the others the
/// version tells, or else the values do: on an accelerator the host then waits, once for all of them.
std::vector<bool> were_written(const std::vector<at::Tensor>& buffers, const std::vector<at::Tensor>& before,
                               const std::vector<VersionWatch>& watches);

} // namespace tessera::internal
