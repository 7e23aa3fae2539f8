#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include <tessera/activations/kept_decision.h>
#include <tessera/parallel/experts.h>
#include <tessera/parallel/experts/check_choice.h>

namespace tessera {

namespace {

/// Keeps a division of weights that are all 0 from being one by 0.
constexpr double kLeastSum = 1e-20;

void check_tensors(const at::Tensor& logits, const at::Tensor& bias) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_floating_point(), "route: the logits are ", logits.scalar_type(),
                    logits.sizes(), ", but must be floating-point numbers [tokens, experts]");
  const auto experts = logits.size(1);
  TORCH_CHECK_VALUE(!bias.defined() || bias.sizes() == c10::IntArrayRef{experts}, "route: the bias has the shape ",
                    bias.defined() ? bias.sizes() : c10::IntArrayRef{}, ", but there are ", experts, " experts");
}

/// The places of the `count` largest along the last dim; of equal ones the first.
at::Tensor largest(const at::Tensor& values, int64_t count) {
  return values.argsort(/*stable=*/true, /*dim=*/-1, /*descending=*/true).narrow(-1, 0, count);
}

/// `ranked` without the experts of all groups but the best.
at::Tensor within_groups(const at::Tensor& ranked, const RouteOptions& options) {
  if (options.top_groups == options.groups) return ranked;
  const auto grouped = ranked.view({ranked.size(0), options.groups, ranked.size(1) / options.groups});
  const auto best = grouped.gather(2, largest(grouped, std::min<int64_t>(2, grouped.size(2)))).sum(2);
  const auto allowed = at::zeros_like(best, at::kBool).scatter_(1, largest(best, options.top_groups), true);
  return grouped.masked_fill(allowed.logical_not().unsqueeze(2), -std::numeric_limits<double>::infinity()).view_as(ranked);
}

at::Tensor choose(const at::Tensor& scores, const RouteOptions& options, const at::Tensor& bias) {
  const at::NoGradGuard no_grad;
  const auto ranked = bias.defined() ? scores.detach() + bias : scores.detach();
  return largest(within_groups(ranked, options), options.top_k).contiguous();
}

} // namespace

namespace internal::experts {

void check_choice(const RouteOptions& options, int64_t experts) {
  TORCH_CHECK_VALUE(options.top_k >= 1 && options.top_k <= experts, "route: top_k is ", options.top_k, ", of ", experts,
                    " experts");
  TORCH_CHECK_VALUE(options.groups >= 1 && experts % options.groups == 0, "route: ", experts, " experts in ", options.groups,
                    " groups, which do not divide them");
  TORCH_CHECK_VALUE(options.top_groups >= 1 && options.top_groups <= options.groups, "route: top_groups is ", options.top_groups,
                    ", of ", options.groups, " groups");
  const auto choices = options.top_groups * (experts / options.groups);
  TORCH_CHECK_VALUE(options.top_k <= choices, "route: top_k is ", options.top_k, ", but ", options.top_groups, " of ",
                    options.groups, " groups have ", choices, " experts");
}

} // namespace internal::experts

Routing route(const at::Tensor& logits, const RouteOptions& options, const at::Tensor& bias) {
  check_tensors(logits, bias);
  internal::experts::check_choice(options, logits.size(1));
  const auto wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  Routing routing;
  routing.scores = options.score == RouterScore::kSoftmax ? at::softmax(wide, 1) : at::sigmoid(wide);
  routing.experts = internal::decided_once([&] { return std::vector{choose(routing.scores, options, bias)}; })[0];
  routing.weights = routing.scores.gather(1, routing.experts);
  if (options.renormalize) routing.weights = routing.weights / (routing.weights.sum(1, /*keepdim=*/true) + kLeastSum);
  if (options.scale != 1) routing.weights = routing.weights * options.scale;
  routing.counts = at::bincount(routing.experts.flatten(), {}, logits.size(1));
  return routing;
}

} // namespace tessera
