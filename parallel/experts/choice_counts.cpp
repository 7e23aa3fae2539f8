#include <tessera/parallel/experts/choice_counts.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <string>

#include <tessera/collectives/process_context.h>

namespace tessera::internal::experts {

namespace {

/// What is wrong with a rank's routing, as a number that goes with its counts.
enum class Fault : int64_t { kNone, kNaN, kShape };

struct Problem {
  Fault fault = Fault::kNone;
  std::string text;
};

const char* text_of(Fault fault) {
  return fault == Fault::kNaN ? "the router returned NaN" : "the routing does not fit its tokens";
}

Problem problem_of(const at::Tensor& tokens, const Routing& routing) {
  const auto& experts = routing.experts;
  if (tokens.dim() != 2)
    return {Fault::kShape, c10::str("the tokens have the shape ", tokens.sizes(), ", but must be [tokens, width]")};
  const bool fits = experts.defined() && experts.dim() == 2 && experts.size(0) == tokens.size(0) &&
                    experts.scalar_type() == at::kLong && routing.weights.sizes() == experts.sizes();
  if (!fits) return {Fault::kShape, c10::str("the routing is not one of ", tokens.size(0), " tokens")};
  const auto all = routing.counts.numel();
  const bool in_range = experts.numel() == 0 || experts.ge(-1).logical_and(experts.lt(all)).all().item<bool>();
  if (!in_range) return {Fault::kShape, c10::str("the routing names an expert outside of [0, ", all, ")")};
  const auto& values = routing.scores.defined() ? routing.scores : routing.weights;
  const auto bad = values.isnan().any(1).sum().item<int64_t>();
  if (bad > 0) return {Fault::kNaN, c10::str(text_of(Fault::kNaN), " for ", bad, " of ", tokens.size(0), " tokens")};
  return {};
}

std::vector<int64_t> to_vector(const at::Tensor& numbers) {
  const auto host = numbers.cpu().contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

/// Sums of so many neighbours.
std::vector<int64_t> sums_of(const std::vector<int64_t>& numbers, int64_t neighbours) {
  std::vector<int64_t> sums;
  for (auto at = numbers.begin(); at != numbers.end(); at += neighbours)
    sums.push_back(std::accumulate(at, at + neighbours, int64_t{0}));
  return sums;
}

/// [ranks, experts of a rank and a fault], what each rank has for this one.
at::Tensor exchange_counts(const at::Tensor& counts, Fault fault, const DeviceMesh& mesh) {
  const auto ranks = mesh.size(), own = counts.numel() / ranks;
  const auto faults = at::full({ranks, 1}, static_cast<int64_t>(fault), counts.options());
  const auto sent = at::cat({counts.view({ranks, own}), faults}, 1).to(mesh.device());
  auto received = at::empty_like(sent);
  mesh.communicator()
      ->all_to_all(received.view({-1}), sent.view({-1}), {}, {}, c10::str("dispatch: counts of ", counts.numel(), " experts"))
      .wait();
  return received;
}

/// What each rank has for this rank's experts, [ranks, experts of a rank]. Throws where another rank has a fault, and this one
/// none, which says its own afterwards.
at::Tensor exchange(const at::Tensor& counts, Fault fault, const DeviceMesh& mesh) {
  const auto ranks = mesh.size(), own = counts.numel() / ranks;
  const auto received = exchange_counts(counts, fault, mesh);
  const auto told = to_vector(received.select(1, own));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto other = static_cast<Fault>(told[static_cast<size_t>(rank)]);
    TORCH_CHECK(other == Fault::kNone || fault != Fault::kNone, "dispatch (rank ", process_context().rank(), "): on rank ",
                mesh.ranks()[static_cast<size_t>(rank)], " ", text_of(other));
  }
  return received.narrow(1, 0, own);
}

/// The counts on the meta device, where no values say them: each rank's choices are spread evenly over all experts, and of those
/// that do not divide the first experts have one more.
ChoiceCounts even_counts(const Routing& routing, const DeviceMesh& mesh, int64_t ranks) {
  const auto experts = routing.counts.numel(), choices = routing.experts.numel(), own = experts / ranks;
  std::vector<int64_t> counts(static_cast<size_t>(experts), choices / experts);
  for (int64_t i = 0; i < choices % experts; ++i) ++counts[static_cast<size_t>(i)];
  ChoiceCounts result;
  result.order = routing.experts.flatten().argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  result.from_each = at::empty({ranks, own}, routing.counts.options());
  if (ranks > 1) exchange_counts(at::empty({experts}, routing.counts.options()), Fault::kNone, mesh);
  result.sent = sums_of(counts, own);
  const auto first = counts.begin() + (ranks > 1 ? mesh.local_rank() * own : 0);
  for (auto count = first; count != first + own; ++count) result.of_expert.push_back(*count * ranks);
  result.received.assign(static_cast<size_t>(ranks), std::accumulate(first, first + own, int64_t{0}));
  return result;
}

} // namespace

ChoiceCounts count_choices(const at::Tensor& tokens, const Routing& routing, const DeviceMesh& mesh) {
  const int64_t ranks = mesh.defined() ? mesh.size() : 1;
  const auto experts = routing.counts.defined() ? routing.counts.numel() : 0;
  TORCH_CHECK_VALUE(experts > 0 && experts % ranks == 0, "dispatch: ", experts, " experts do not divide among the ", ranks,
                    " ranks of ", mesh.defined() ? mesh.to_string() : "no mesh");
  if (tokens.is_meta()) return even_counts(routing, mesh, ranks);
  const auto problem = problem_of(tokens, routing);
  const auto with_problem = [&] {
    TORCH_CHECK(problem.fault == Fault::kNone, "dispatch (rank ", process_context().rank(), "): ", problem.text);
  };
  auto counts = at::zeros({experts}, routing.counts.options());
  ChoiceCounts result;
  if (problem.fault == Fault::kNone) {
    const auto chosen = routing.experts.flatten();
    const auto keys = chosen.masked_fill(chosen.lt(0), experts);
    counts = at::bincount(keys, {}, experts + 1).narrow(0, 0, experts);
    result.order = keys.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  } else if (ranks == 1) {
    with_problem();
  }
  result.from_each = ranks == 1 ? counts.unsqueeze(0) : exchange(counts, problem.fault, mesh);
  with_problem();
  result.sent = sums_of(to_vector(counts), experts / ranks);
  result.received = to_vector(result.from_each.sum(1));
  result.of_expert = to_vector(result.from_each.sum(0));
  result.order = result.order.narrow(0, 0, std::accumulate(result.sent.begin(), result.sent.end(), int64_t{0}));
  return result;
}

} // namespace tessera::internal::experts
