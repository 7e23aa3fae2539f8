#pragma once

// Internal: layers whose product runs beside the collective of their activation.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include <tessera/dtensor/placement.h>
#include <tessera/parallel/overlap.h>

namespace tessera::internal::parallel {

/// A layer that multiplies an activation [..., in] by a weight [in, out], both DTensors of one 1-D mesh.
struct ProductLayer {
  at::Tensor input, weight;
  Placement wanted;                ///< where the activation enters
  std::optional<Placement> leaves; ///< where the result goes
  std::string label;               ///< the operator and the parameter
};

/// What the layer gives, in autograd's graph where grad mode asks for it: its activation enters while it is multiplied, or its
/// result leaves so. Undefined where the layer has no such collective, or is not to overlap it; then nothing was done. Every rank
/// of the mesh calls it.
at::Tensor overlapped_product(const ProductLayer& layer, const OverlapOptions& options);

} // namespace tessera::internal::parallel
