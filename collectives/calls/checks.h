#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/calls/collective_call.h>
#include <tessera/collectives/communicator.h>

#include <string>
#include <string_view>

namespace tessera::internal {

/// Names a collective in errors: all_gather 'blocks.0' of group default [0, 1] on rank 1.
std::string describe(const Communicator& group, CollectiveKind kind, std::string_view label);
std::string describe(const Communicator& group, const CollectiveCall& call);

/// Whether they have bytes in common, whatever storages they are views of.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// The argument checks that every backend does first. Throws c10::Error that names the operation, label, group and rank. Fills in
/// the equal splits that empty lists stand for.
void check(const Communicator& group, CollectiveCall& call);

} // namespace tessera::internal
