#pragma once

// Internal: parameters of experts, of which each rank of a mesh has others.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

/// What `expert_parallel` says of a parameter. Its gradient arrives as the sum of the terms of all ranks over which the experts
/// are split; the ranks of `fully_shard`, which have the same experts, are left to be added.
struct ExpertMark {
  DeviceMesh experts;                 ///< 1-D: the ranks over which they are split
  std::optional<int64_t> token_ranks; ///< how many ranks have tokens for them in all
  int64_t ranks_of_loss = 1;          ///< how many of these have one loss together (tensor parallelism)
};

void mark_expert(const at::Tensor& parameter, const ExpertMark& mark);
/// Null for a parameter that is no expert's.
const ExpertMark* expert_mark(const at::Tensor& parameter);

/// An error for an expert's parameter where `mesh` has ranks with other experts, or not all that have the same.
void check_expert(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh);

/// What the sum of the gradients of experts is divided by where `mesh` reduces them: the ranks with a loss of their own, as for
/// all other parameters. Nothing where none of `parameters` is an expert's. An error that names one where only some are.
std::optional<double> expert_divisor(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                                     const DeviceMesh& mesh);

} // namespace tessera::internal
