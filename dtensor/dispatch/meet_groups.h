#pragma once

// Internal: a call that reads tensors of a mesh and of the same ranks in rows.

#include <ATen/core/stack.h>

#include <tessera/dtensor/calls/op_info.h>

namespace tessera::internal::dispatch {

/// Brings the DTensors of a call to one mesh where some lie on a plan's 1-D mesh and others on its ranks in rows
/// (`PlannedMeshes::add_groups`). Those of the line join the rows where all of them are whole; else those of the rows join the
/// line. Returns whether one was brought. Under StrictSharding it is an error in forward where one has to be gathered for that.
bool bring_to_one_mesh(const OpInfo& info, torch::jit::Stack* stack);

} // namespace tessera::internal::dispatch
