#pragma once

// Internal: how many tokens go to which expert, as the ranks of a dispatch tell each other, with what is wrong on one of them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/parallel/experts.h>

namespace tessera::internal::experts {

struct ChoiceCounts {
  at::Tensor order; ///< the places of this rank's choices, tokens × top_k, by their experts, without those that were dropped
  std::vector<int64_t> sent;      ///< to each rank, in rows
  std::vector<int64_t> received;  ///< from each rank
  std::vector<int64_t> of_expert; ///< of each of this rank's experts, from all ranks
  at::Tensor from_each;           ///< int64: the same by ranks, one after another, each by experts; on the device of the tokens
};

/// Every rank of `mesh`, which may be undefined for this one alone, calls it. An error on all of them where the routing of one
/// does not fit its tokens, or has NaN.
ChoiceCounts count_choices(const at::Tensor& tokens, const Routing& routing, const DeviceMesh& mesh);

} // namespace tessera::internal::experts
