#pragma once

// Internal: what a ContextParallelScope says.

#include <tessera/activations/carried_scope.h>
#include <tessera/activations/open_runs.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/context_attention.h>

namespace tessera::internal {

struct ContextScope : CarriedScope {
  ContextScope(ContextParallel of, DeviceMesh over) : scheme(of), mesh(std::move(over)) {}
  const ContextParallel scheme;
  const DeviceMesh mesh; ///< of plain parts; undefined without
};

/// The innermost of this thread; null outside of all.
inline const ContextScope* context_scope() { return static_cast<const ContextScope*>(open_runs->carried.get()); }

} // namespace tessera::internal
