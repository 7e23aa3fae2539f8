#include <tessera/parallel/split_logits.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/redistribute/move.h>

namespace tessera {

namespace {

using internal::chunk_extent;
using internal::dtensor_meta;

void check_logits(const at::Tensor& logits, const char* function) {
  TORCH_CHECK_VALUE(logits.dim() > 0 && logits.is_floating_point(), function,
                    ": logits are floating-point numbers [..., classes], not ", logits.scalar_type(), " ", logits.sizes());
}

/// The mesh dim that splits the classes; none where each rank has all of its rows. An error for other layouts.
std::optional<size_t> dim_of_classes(const at::Tensor& logits, const char* function) {
  const auto* const meta = dtensor_meta(logits);
  if (!meta) return std::nullopt;
  std::optional<size_t> found;
  const auto& placements = meta->spec->placements();
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    const auto* shard = std::get_if<Shard>(&placements[dim]);
    const bool is_class_dim = shard && shard->dim == logits.dim() - 1;
    TORCH_CHECK_VALUE((shard || is_replicate(placements[dim])) && !(is_class_dim && found), function, ": logits lie as ",
                      meta->spec->to_string(), ", not as Shard or Replicate with classes that one dim splits");
    if (is_class_dim) found = dim;
  }
  return found;
}

/// The largest of plain logits. `max` gives the first of equal ones.
LargestLogits largest_of(const at::Tensor& logits, int64_t k) {
  auto [values, classes] = k == 1 ? logits.max(-1, /*keepdim=*/true) : logits.topk(k, -1);
  return {std::move(values), std::move(classes)};
}

/// What all ranks have of `own` [..., k], of which rank r has `counts[r]` in front: [..., sum of the counts].
at::Tensor candidates(const at::Tensor& own, const std::vector<int64_t>& counts, Communicator& communicator) {
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), communicator.size());
  const auto all = at::empty(sizes, own.options());
  communicator.all_gather_into(all.view(-1), own.contiguous().view(-1), "the largest logits").wait();
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < counts.size(); ++rank)
    parts.push_back(all.select(0, static_cast<int64_t>(rank)).narrow(-1, 0, counts[rank]));
  return at::cat(parts, -1);
}

at::Tensor padded(const at::Tensor& tensor, int64_t count) {
  auto sizes = tensor.sizes().vec();
  sizes.back() = count - sizes.back();
  return sizes.back() == 0 ? tensor : at::cat({tensor, at::full(sizes, 0, tensor.options())}, -1);
}

LargestLogits largest_of_ranks(const at::Tensor& local, const Spec& spec, size_t dim, int64_t k) {
  const auto mesh_dim = static_cast<int64_t>(dim);
  const auto ranks = spec.mesh().size(mesh_dim), all = spec.sizes().back();
  std::vector<int64_t> counts;
  for (int64_t rank = 0; rank < ranks; ++rank) counts.push_back(std::min(k, chunk_extent(all, ranks, rank).size));
  const auto rank = spec.mesh().local_rank(mesh_dim);
  const auto count = counts[static_cast<size_t>(rank)];
  auto own =
      count > 0 ? largest_of(local, count) : LargestLogits{local, at::empty(local.sizes(), local.options().dtype(at::kLong))};
  own.classes = own.classes + chunk_extent(all, ranks, rank).offset;
  const auto communicator = spec.mesh().communicator(mesh_dim);
  const auto values = candidates(padded(own.values, k), counts, *communicator);
  const auto classes = candidates(padded(own.classes, k), counts, *communicator);
  auto best = largest_of(values, k);
  return {std::move(best.values), classes.gather(-1, best.classes)};
}

} // namespace

LargestLogits largest_logits(const at::Tensor& logits, int64_t k) {
  constexpr auto* kFunction = "largest_logits";
  check_logits(logits, kFunction);
  TORCH_CHECK_VALUE(k >= 1 && k <= logits.size(-1), kFunction, ": the ", k, " largest of ", logits.size(-1), " classes");
  const at::NoGradGuard no_grad;
  const auto dim = dim_of_classes(logits, kFunction);
  if (!is_dtensor(logits)) return largest_of(logits, k);
  const auto& meta = internal::meta_of(logits, kFunction);
  const auto& spec = *meta.spec;
  const auto [values, classes] = dim ? largest_of_ranks(meta.local, spec, *dim, k) : largest_of(meta.local, k);
  auto placements = spec.placements();
  if (dim) placements[*dim] = Replicate{};
  auto sizes = spec.sizes();
  sizes.back() = k;
  return {from_local(values, spec.mesh(), placements, sizes), from_local(classes, spec.mesh(), placements, sizes)};
}

at::Tensor sample_logits(const at::Tensor& logits, const SampleOptions& options) {
  constexpr auto* kFunction = "sample_logits";
  check_logits(logits, kFunction);
  TORCH_CHECK_VALUE(options.temperature >= 0, kFunction, ": the temperature is ", options.temperature);
  TORCH_CHECK_VALUE(options.top_k >= 0 && options.top_k <= logits.size(-1), kFunction, ": the ", options.top_k, " largest of ",
                    logits.size(-1), " classes");
  const at::NoGradGuard no_grad;
  if (options.temperature == 0) return largest_logits(logits, 1).classes.squeeze(-1);
  const auto exact = logits.to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  constexpr double kTiny = 1e-20; // over which a large logit would be infinite
  const auto finite = options.temperature < kTiny ? exact - largest_logits(exact, 1).values : exact;
  auto scores = finite / options.temperature - at::empty_like(exact).exponential_(1, options.generator).log();
  if (options.top_k > 0 && options.top_k < logits.size(-1)) {
    const auto least = largest_logits(exact, options.top_k).values.narrow(-1, options.top_k - 1, 1);
    scores = scores.masked_fill(exact < least, -std::numeric_limits<double>::infinity());
  }
  return largest_logits(scores, 1).classes.squeeze(-1);
}

at::Tensor log_probabilities(const at::Tensor& logits, const at::Tensor& classes) {
  constexpr auto* kFunction = "log_probabilities";
  check_logits(logits, kFunction);
  TORCH_CHECK_VALUE(classes.sizes() == logits.sizes().slice(0, logits.dim() - 1), kFunction, ": classes ", classes.sizes(),
                    " of logits ", logits.sizes());
  if (is_dtensor(logits) && !is_dtensor(classes)) {
    const auto& mesh = internal::meta_of(logits, kFunction).spec->mesh();
    return log_probabilities(logits, from_local(classes, mesh, Placements(static_cast<size_t>(mesh.ndim()), Replicate{})));
  }
  if (logits.dim() == 1) return log_probabilities(logits.unsqueeze(0), classes.unsqueeze(0)).squeeze(0);
  const auto rows = logits.dim() == 2 ? logits : logits.flatten(0, -2);
  const auto loss = at::cross_entropy_loss(rows, classes.reshape({-1}), {}, at::Reduction::None, /*ignore_index=*/-100);
  return loss.neg().view(classes.sizes());
}

} // namespace tessera
