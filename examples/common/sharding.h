#pragma once

#include <tessera/mesh/device_mesh.h>
#include <torch/nn/module.h>

#include "common/job_options.h"

namespace examples {

/// The mesh of a job under `options`; undefined without a strategy. Every rank calls it, after `join_job`.
tessera::DeviceMesh make_mesh(const JobOptions& options);

/// What `fully_shard` is to do under `options`.
tessera::FullyShardOptions shard_options(const JobOptions& options);

/// `tessera::fully_shard` or `tessera::replicate`, as `options` say. Every rank calls it.
void shard_module(torch::nn::Module& module, const tessera::DeviceMesh& mesh, const JobOptions& options);

} // namespace examples
