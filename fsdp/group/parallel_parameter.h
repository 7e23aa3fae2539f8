#pragma once

// Internal: parameters that are DTensors already, over dims of the mesh that are foreign to data parallelism: tensor parallelism
// has split or copied them, and their parts are sharded further (FSDP2's 2-D parallelism).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include <tessera/dtensor/spec.h>
#include <tessera/fsdp/group/sharded_parameter.h>
#include <tessera/fsdp/layout/group_layout.h>
#include <tessera/fsdp/layout/mesh_roles.h>

namespace tessera::internal {

/// An error that names the parameter, a DTensor, unless it is Shard, StridedShard or Replicate over dims of the root of `mesh`
/// that `mesh` does not have.
void check_parallel(const at::Tensor& parameter, const std::string& name, const DeviceMesh& mesh);

/// How forward reads such a parameter in `dtype`: as it lies, row-major.
SpecPtr spec_in_forward(const Spec& parallel, at::ScalarType dtype);

/// The place of the foreign dims in the mesh of a parameter that is sharded further.
enum class ForeignDims : uint8_t {
  kLast,  ///< as in FSDP2
  kFirst, ///< parts of any part have a name so, a RaggedShard too. All parameters of a model with styles have one mesh, also
          ///< packed ones.
};

/// How a parameter lies whose parts, that `parallel` gave the ranks, are split by `along_shard`: on the mesh of the data-parallel
/// dims and the foreign ones. Where both split one dim, the foreign one did first.
SpecPtr shard_further(const Spec& parallel, at::ScalarType dtype, const MeshRoles& roles, const Placement& along_shard,
                      ForeignDims order);

/// Whether parts of its parts have a name with the foreign dims first alone.
bool is_packed(const Spec& parallel);

/// Whether a RaggedShard can split its parts.
bool may_be_ragged(const Spec& parallel);

/// The part of the ranks that have most of it.
LargestPart largest_part(const Spec& parallel);

/// What a read of the parameter in forward gets: a DTensor of the part that `leaf` holds. Differentiable.
at::Tensor as_parallel(const at::Tensor& leaf, const Spec& parallel);

/// Whether the gradient of the leaf is a term of a sum over the foreign ranks, which all have the parameter: where activations
/// between the layers are split over them. The terms of all parameters are summed at the end of a backward.
bool gives_terms(const ShardedParameter& parameter);

/// `as_parallel`, whose gradient goes to the leaf as this rank's term: one that is whole counts on the first rank alone.
at::Tensor as_parallel_of_terms(const at::Tensor& leaf, const Spec& parallel);

/// `whole`, the same on all ranks of the mesh, on the first of them, and zeros on the others.
at::Tensor once(const at::Tensor& whole, const DeviceMesh& mesh);

/// What a read of the leaf gets beside activations that are DTensors of `mesh`, whose sequences are split over the dim `split`: a
/// DTensor that every rank has. Each rank's gradient is the term of its own positions, and goes to the leaf as it is, without
/// communication: the reduction of the group adds the terms. Differentiable.
at::Tensor beside_split_sequences(const at::Tensor& leaf, const DeviceMesh& mesh, int64_t split);

} // namespace tessera::internal
