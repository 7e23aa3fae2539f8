#pragma once

// Internal: activations at the borders of a layer.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/base/per_thread.h>
#include <tessera/dtensor/placement.h>

namespace tessera::internal::parallel {

/// `placement` with its dim counted from the first of `ndim`.
Placement at_dim(Placement placement, int64_t ndim);

/// `x`, a DTensor of a 1-D mesh, under `wanted`. Where a gradient is to come this is a node of its own, also where nothing moves:
/// the gradients of all that read `x` one after another go through one node, so that autograd sums them before the one reduction,
/// and what was moved for the first reader serves the others. `label` names the reader in errors.
at::Tensor entered(const at::Tensor& x, const Placement& wanted, const std::string& label);

/// Whether `entered` would give what was moved for the reader before, and move nothing.
bool has_entered(const at::Tensor& x, const Placement& wanted);

/// An activation in a layer, and the number of layers that have read it as yet.
struct InLayer {
  at::Tensor x;
  std::shared_ptr<const int64_t> readers;
};

/// What `entered` gives, of values that were moved already: `moved` is `x` under the placement that a layer wants. Readers after
/// this one get it too.
InLayer entered_as(const at::Tensor& x, const at::Tensor& moved);

/// Lets go of what was moved for the last reader.
void forget_entered();

/// `result`, a DTensor of a 1-D mesh, under `wanted`.
at::Tensor left(const at::Tensor& result, const Placement& wanted, const std::string& label);

/// As `left`, but a layer whose result was a sum gets the gradient where that comes from: it brings it to itself in codes.
at::Tensor left_with_gradient(const at::Tensor& result, const Placement& wanted, const std::string& label);

/// While it lives, this thread is inside of a layer whose activation has entered: parameters that are read there move nothing.
class InsideLayer {
 public:
  InsideLayer();
  static bool is_here();

 private:
  const ScopedValue<bool> inside_;
};

} // namespace tessera::internal::parallel
