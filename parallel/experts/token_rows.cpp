#include <tessera/parallel/experts/token_rows.h>

#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/mesh/part_order.h>

namespace tessera::internal::experts {

namespace {

at::Tensor as_rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

/// Whether each rank of the mesh has some of the tokens of `x`, with all their features.
bool splits_tokens(const DTensor& x) {
  const auto* shard = std::get_if<Shard>(x.placements().data());
  return shard && shard->dim < x.dim() - 1;
}

void check_mesh(const at::Tensor& x, const DeviceMesh& tensor_parallel) {
  const auto& mesh = DTensor(x).mesh();
  TORCH_CHECK_VALUE(tensor_parallel.defined() && mesh == tensor_parallel, "MoE (rank ", process_context().rank(),
                    "): x is a DTensor on ", mesh.to_string(), ", but the layer knows ",
                    tensor_parallel.defined() ? tensor_parallel.to_string() : "no ranks of tensor parallelism",
                    ": call expert_parallel before parallelize, with ExpertParallelOptions::tensor_parallel");
}

} // namespace

TokenRows::TokenRows(const at::Tensor& x, RouterImpl& router, const DeviceMesh& tensor_parallel)
    : sizes_(x.sizes().vec()), is_plain_(!is_dtensor(x)) {
  const bool is_of_sequences = !is_plain_ && part_dim(DTensor(x).mesh());
  const bool is_of_one_rank = !tensor_parallel.defined() && is_plain_;
  if (is_of_sequences) split_ = x;
  if (is_of_sequences || is_of_one_rank) {
    rows_ = as_rows(is_plain_ ? x : to_local(x));
    logits_ = router.forward(rows_);
    return;
  }
  if (!is_plain_) check_mesh(x, tensor_parallel);
  take_parts(is_plain_ ? from_local(x, tensor_parallel, {Replicate{}}) : x, router);
}

void TokenRows::take_parts(const at::Tensor& x, RouterImpl& router) {
  split_ = x;
  if (!splits_tokens(DTensor(x))) {
    const auto whole = DTensor(x).redistribute({Replicate{}});
    split_ = DTensor(as_rows(whole)).redistribute({Shard{0}});
    is_flat_ = true;
  }
  logits_ = as_rows(to_local(router.forward(split_)));
  rows_ = as_rows(to_local(split_));
}

TokenSequences TokenRows::sequences() const {
  TORCH_CHECK_VALUE(sizes_.size() == 3, "MoE: BalanceScope::kSequence needs x [rows, time, width], but it has ", sizes_.size(),
                    " dims");
  TokenSequences all{.count = sizes_[0]};
  if (!split_.defined() || DTensor(split_).mesh().size() == 1) return all;
  const DTensor split(split_);
  // Each token's number in the whole, as the tokens lie.
  auto numbers = at::arange(sizes_[0] * sizes_[1], at::TensorOptions(at::kLong).device(split.mesh().device()));
  if (!is_flat_) numbers = numbers.view({sizes_[0], sizes_[1]});
  const auto whole = from_local(numbers, split.mesh(), Placements(split.placements().size(), Replicate{}));
  all.of_token = whole.redistribute(split.placements()).local().flatten().div(std::max<int64_t>(1, sizes_[1]), "floor");
  all.ranks = split.mesh();
  if (part_dim(split.mesh())) all.loss_ranks = static_cast<double>(split.mesh().size());
  return all;
}

at::Tensor TokenRows::shaped(const at::Tensor& rows) const {
  if (!split_.defined()) return rows.view(sizes_);
  const DTensor split(split_);
  const auto local = rows.view(split.local().sizes());
  auto whole = from_local(local, split.mesh(), split.placements(), split.sizes().vec());
  if (!is_flat_) return whole;
  const auto shaped = DTensor(whole).redistribute({Replicate{}}).view(sizes_);
  return is_plain_ ? to_local(shaped) : shaped;
}

} // namespace tessera::internal::experts
