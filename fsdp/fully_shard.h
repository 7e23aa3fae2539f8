#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include <tessera/fsdp/fsdp_module.h>
#include <tessera/fsdp/options.h>
#include <tessera/mesh/device_mesh.h>

namespace tessera {

/// Shards the parameters of `module` that no earlier call claimed, as one communication group, in place (FSDP2: fully_shard).
///
/// Call it bottom-up: first the blocks, then the root. Parameters that no call claimed stay plain, and their gradients local. A
/// parameter that is registered later is an error in the next forward, unless it is frozen or sharded too. A module whose
/// parameters all belong to earlier calls gets no group, but its options apply in a `tessera::call` of it. `mesh` is 1-D
/// (parameters sharded over it) or 2-D (replicated over its first dim, sharded over its second: HSDP). A parameter may be a
/// DTensor already, Shard or Replicate over other dims of the mesh that `mesh` is a slice of (tensor parallelism): its parts are
/// sharded, and forward reads it as it was.
/// Moves parameters and buffers to the mesh's device. Every rank of the mesh calls it, in the same order with the same modules
/// and options. Errors name the module and the parameter. An error while the parameters
/// are being sharded, for example without memory, leaves them unchanged. If some were already sharded, the model cannot be used:
/// each read of it is an error that says so.
FSDPModule fully_shard(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& module, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

/// One group for the parameters of several modules.
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const DeviceMesh& mesh,
                       const FullyShardOptions& options = {});

/// Shards on a 1-D mesh of all ranks: of CUDA devices if this process has one, otherwise of CPUs (FSDP2: no `mesh`).
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& module, const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

/// Data parallel without sharding: every rank keeps the whole parameters, gradients are all-reduced (FSDP2: replicate). `mesh` is
/// 1-D; `mesh.flatten()` makes it so. Otherwise as `fully_shard`.
FSDPModule replicate(torch::nn::Module& module, const DeviceMesh& mesh, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule replicate(const torch::nn::ModuleHolder<Contained>& module, const DeviceMesh& mesh,
                     const FullyShardOptions& options = {}) {
  return replicate(static_cast<torch::nn::Module&>(*module.ptr()), mesh, options);
}

/// Replicates on a 1-D mesh of all ranks, as for `fully_shard`.
FSDPModule replicate(torch::nn::Module& module, const FullyShardOptions& options = {});

template <typename Contained>
FSDPModule replicate(const torch::nn::ModuleHolder<Contained>& module, const FullyShardOptions& options = {}) {
  return replicate(static_cast<torch::nn::Module&>(*module.ptr()), options);
}

/// The handle of a module that was sharded; an error for any other.
FSDPModule fsdp(const torch::nn::Module& module);
/// Whether it has one: not for a module whose parameters were sharded with one above it.
bool is_sharded(const torch::nn::Module& module);

} // namespace tessera
