#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collectives/collective_call.h>
#include <tessera/collectives/communicator.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera::internal {

/// Names a collective in errors: all_gather 'blocks.0' of group default [0, 1] on rank 1.
std::string describe(const Communicator& group, CollectiveKind kind, std::string_view label);
std::string describe(const Communicator& group, const CollectiveCall& call);

/// Whether they have bytes in common, whatever storages they are views of.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// The argument checks that every backend does first. Throws c10::Error that names the operation, label, group and rank. Fills in
/// the equal splits that empty lists stand for.
void check(const Communicator& group, CollectiveCall& call);

void check_all_gather(const Communicator& group, const at::Tensor& output, const at::Tensor& input, std::string_view label);
void check_reduce_scatter(const Communicator& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                          std::string_view label);
void check_all_reduce(const Communicator& group, const at::Tensor& tensor, ReduceOp op, std::string_view label);
void check_send(const Communicator& group, const at::Tensor& tensor, int to, std::string_view label);
void check_receive(const Communicator& group, const at::Tensor& tensor, int from, std::string_view label);
void check_broadcast(const Communicator& group, const at::Tensor& tensor, int root, std::string_view label);
AllToAllSplits check_all_to_all(const Communicator& group, const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                std::string_view label);

} // namespace tessera::internal
