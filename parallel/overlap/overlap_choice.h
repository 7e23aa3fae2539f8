#pragma once

// Internal: whether it pays to overlap a layer's product with its collective, measured once a size.

#include <functional>
#include <string>

#include <tessera/mesh/device_mesh.h>

namespace tessera::internal::parallel {

/// The two ways of a layer.
struct TwoWays {
  std::function<void()> apart, overlapped;
};

/// Whether the second way is faster: tried where nobody has asked for `size` on this mesh before, and then the same for ever, on
/// all ranks. `layer` names it in the log. Every rank of the 1-D mesh calls it.
bool overlap_is_faster(const std::string& size, const std::string& layer, const DeviceMesh& mesh, const TwoWays& ways);

} // namespace tessera::internal::parallel
