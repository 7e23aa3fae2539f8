#include <ATen/TensorOperators.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/repeat_interleave.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <optional>
#include <utility>

#include <tessera/dtensor/api.h>
#include <tessera/parallel/experts.h>
#include <tessera/parallel/experts/choice_counts.h>
#include <tessera/parallel/experts/row_moves.h>

namespace tessera {

namespace {

using internal::experts::ChoiceCounts, internal::experts::RowExchange, internal::experts::TokenPlan;

RowExchange exchange_of(const ChoiceCounts& counts, const DeviceMesh& mesh, int64_t experts, int64_t width, const char* what) {
  RowExchange exchange{.sent = counts.sent, .received = counts.received};
  if (mesh.defined() && mesh.size() > 1) exchange.communicator = mesh.communicator();
  exchange.name = c10::str(what, " of ", experts, " experts, width ", width);
  return exchange;
}

/// What comes from the ranks, each by experts, in the order of the experts.
at::Tensor order_of_arrivals(const ChoiceCounts& counts) {
  const auto experts = counts.from_each.size(1);
  const std::optional<int64_t> all = std::accumulate(counts.received.begin(), counts.received.end(), int64_t{0});
  const auto of_rank_and_expert = at::repeat_interleave(counts.from_each.flatten(), all);
  return of_rank_and_expert.remainder(experts).argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
}

void check_mesh(const at::Tensor& tokens, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(!mesh.defined() || mesh.ndim() == 1, "dispatch: the mesh must have one dim, as mesh[\"ep\"] has, but it is ",
                    mesh.to_string());
  TORCH_CHECK_VALUE(!is_dtensor(tokens), "dispatch: the tokens are a DTensor; to_local gives this rank's part of them");
}

} // namespace

Dispatched dispatch(const at::Tensor& tokens, const Routing& routing, const DeviceMesh& mesh) {
  check_mesh(tokens, mesh);
  auto counts = internal::experts::count_choices(tokens, routing, mesh);
  const auto top_k = routing.experts.size(1);
  auto plan = std::make_shared<TokenPlan>(
      TokenPlan{.tokens = tokens.size(0),
                .top_k = top_k,
                .by_expert = internal::experts::map_from(counts.order, tokens.size(0) * top_k),
                .exchange = exchange_of(counts, mesh, routing.counts.numel(), tokens.size(1), "dispatch")});
  internal::experts::RowsInFlight rows(internal::experts::take_rows(tokens, plan->by_expert, top_k), plan->exchange);
  auto received = rows.wait();
  if (plan->exchange.communicator) {
    plan->by_rank = internal::experts::map_from(order_of_arrivals(counts), received.size(0));
    received = internal::experts::take_rows(received, plan->by_rank);
  }
  return {std::move(received), std::move(counts.of_expert), std::move(plan)};
}

at::Tensor combine(const at::Tensor& outputs, const Dispatched& dispatched, const Routing& routing,
                   const std::function<at::Tensor()>& beside) {
  const auto& plan = *dispatched.plan;
  TORCH_CHECK_VALUE(outputs.dim() == 2 && outputs.size(0) == dispatched.tokens.size(0), "combine: the outputs have the shape ",
                    outputs.sizes(), ", but ", dispatched.tokens.size(0), " tokens were dispatched to this rank");
  auto back = plan.exchange;
  std::swap(back.sent, back.received);
  back.name.replace(0, back.name.find(' '), "combine");
  internal::experts::RowsInFlight rows(back.communicator ? internal::experts::put_rows(outputs, plan.by_rank) : outputs, back);
  const auto other = beside ? beside() : at::Tensor();
  const auto placed = internal::experts::put_rows(rows.wait(), plan.by_expert);
  const auto wide = placed.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto choices = placed.view({plan.tokens, plan.top_k, outputs.size(1)}).to(wide);
  const auto sum = (choices * routing.weights.to(wide).unsqueeze(2)).sum(1).to(outputs.scalar_type());
  return other.defined() ? sum + other : sum;
}

} // namespace tessera
