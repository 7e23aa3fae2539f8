#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>

#include <tessera/activations/kept_decision.h>
#include <tessera/collectives/process_context.h>
#include <tessera/parallel/experts.h>

namespace tessera {

namespace {

/// The ranks whose tokens count together.
struct TokenRanks {
  explicit TokenRanks(const DeviceMesh& mesh) : size(mesh.defined() ? mesh.size() : 1) {
    if (size > 1) communicator = process_context().communicator(mesh.rank_list(), mesh.device_type(), "experts.counts");
  }
  int64_t rank() const { return communicator ? communicator->rank() : 0; }
  /// [ranks, …] of `own`, of one shape on all ranks.
  at::Tensor gathered(const at::Tensor& own, const char* label) const {
    if (!communicator) return own.unsqueeze(0);
    auto all = at::empty({size * own.numel()}, own.options());
    communicator->all_gather_into(all, own.contiguous().view({-1}), label).wait();
    auto shape = own.sizes().vec();
    shape.insert(shape.begin(), size);
    return all.view(shape);
  }
  int64_t size;
  CommunicatorPtr communicator;
};

/// The place of each choice among those of its expert, in their order. `experts`: [choices], below `count`.
at::Tensor places_within(const at::Tensor& experts, int64_t count) {
  const auto order = experts.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto counts = at::bincount(experts, {}, count);
  const auto sorted = experts.index_select(0, order);
  const auto places = at::arange(experts.numel(), experts.options()) - (counts.cumsum(0) - counts).index_select(0, sorted);
  return at::zeros_like(experts).scatter_(0, order, places);
}

double tokens_of_all(const Routing& routing, const TokenRanks& ranks) {
  const auto own = at::full({1}, routing.experts.size(0), routing.experts.options());
  return static_cast<double>(ranks.gathered(own, "capacity: tokens").sum().item<int64_t>());
}

at::Tensor kept_by_order(const Routing& routing, const TokenRanks& ranks, int64_t capacity) {
  const auto experts = routing.experts.flatten();
  const auto counts = ranks.gathered(routing.counts, "capacity: counts");
  const auto before = counts.narrow(0, 0, ranks.rank()).sum(0);
  const auto places = places_within(experts, routing.counts.numel()) + before.index_select(0, experts);
  return places.lt(capacity);
}

/// The choices of all ranks, each padded to as many; what pads has the expert `none`.
at::Tensor kept_by_score(const Routing& routing, const TokenRanks& ranks, int64_t capacity) {
  const auto none = routing.counts.numel(), own = routing.experts.numel();
  const auto most = ranks.gathered(at::full({1}, own, routing.experts.options()), "capacity: choices").max().item<int64_t>();
  auto experts = at::full({most}, none, routing.experts.options());
  auto weights = at::zeros({most}, routing.weights.options());
  experts.narrow(0, 0, own).copy_(routing.experts.flatten());
  weights.narrow(0, 0, own).copy_(routing.weights.detach().flatten());
  experts = ranks.gathered(experts, "capacity: experts").flatten();
  weights = ranks.gathered(weights, "capacity: weights").flatten();
  const auto best_first = weights.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/true);
  const auto kept = places_within(experts.index_select(0, best_first), none + 1).lt(capacity);
  return at::zeros_like(kept).scatter_(0, best_first, kept).narrow(0, ranks.rank() * most, own);
}

at::Tensor kept_choices(const Routing& routing, const Capacity& capacity, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const TokenRanks ranks(mesh);
  const auto choices = tokens_of_all(routing, ranks) * static_cast<double>(routing.experts.size(1));
  const auto most = static_cast<int64_t>(std::ceil(capacity.factor * choices / static_cast<double>(routing.counts.numel())));
  const auto kept =
      capacity.drop == CapacityDrop::kLastToken ? kept_by_order(routing, ranks, most) : kept_by_score(routing, ranks, most);
  return kept.view_as(routing.experts);
}

} // namespace

Routing limit_to_capacity(Routing routing, const Capacity& capacity, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(std::isfinite(capacity.factor) && capacity.factor > 0, "limit_to_capacity: the factor is ", capacity.factor,
                    ", but must be positive");
  const auto kept = internal::decided_once([&] { return std::vector{kept_choices(routing, capacity, mesh)}; })[0];
  routing.experts = routing.experts.masked_fill(kept.logical_not(), -1);
  routing.weights = routing.weights.masked_fill(kept.logical_not(), 0);
  return routing;
}

} // namespace tessera
