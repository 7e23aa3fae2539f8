#pragma once

#include <tessera/mesh/device_mesh.h>

#include "gpt/model.h"
#include "gpt/options.h"

namespace gpt {

/// The mesh of a job under `options`. Every rank calls it, after `init_process_group`.
tessera::DeviceMesh make_mesh(const Options& options);

/// Shards `model` over `mesh` as `options` say: every block is a group, and what remains is the root's. Every rank calls it.
void shard(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options);

} // namespace gpt
