#include <tessera/parallel/tensor/overlapped.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/matmul.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include <tessera/dtensor/redistribute/move.h>
#include <tessera/parallel/overlap/chunked_product.h>
#include <tessera/parallel/overlap/overlap_choice.h>
#include <tessera/parallel/tensor/entered.h>
#include <tessera/parallel/tensor/gather_again.h>
#include <tessera/parallel/tensor/product_nodes.h>

namespace tessera::internal::parallel {

namespace {

/// `placement` of the features of a weight [in, out], its dim 1, for the last dim of a result.
Placement of_features(const Placement& placement, int64_t ndim) {
  if (const auto* strided = std::get_if<StridedShard>(&placement)) return StridedShard{ndim - 1, strided->split_factor};
  return Shard{ndim - 1};
}

ContextPtr context_of(const ProductLayer& layer, const OverlapOptions& options, SpecPtr result) {
  auto context = c10::make_intrusive<LayerContext>();
  context->label = layer.label + " (backward)";
  context->chunks = options.chunks;
  context->source = dtensor_meta(layer.input)->spec;
  context->result = std::move(result);
  return context;
}

bool overlaps(const ProductLayer& layer, const OverlapOptions& options, const char* collective, const TwoWays& ways) {
  if (options.when != Overlap::kMeasured) return options.when == Overlap::kAlways;
  const auto &input = spec_of(layer.input), &weight = spec_of(layer.weight);
  const auto rows = input.numel() / input.sizes().back();
  if (rows * weight.numel() / input.mesh().size() < options.smallest_measured) return false;
  const auto text = [](const Spec& spec) {
    return fmt::format("{} [{}] ({})", c10::toString(spec.dtype()), fmt::join(spec.sizes(), ", "),
                       to_string(spec.placements()[0]));
  };
  const at::NoGradGuard no_grad;
  return overlap_is_faster(fmt::format("{} x {}, {} in {} chunks", text(input), text(weight), collective, options.chunks),
                           layer.label, input.mesh(), ways);
}

at::Tensor gathered_product(const ProductLayer& layer, const OverlapOptions& options) {
  const auto &input = layer.input, &weight = layer.weight;
  if (has_entered(input, Replicate{})) return {};
  const auto own_weight = meta_of(weight, layer.label.c_str()).local;
  const auto both = [&] { return gather_parts(input, own_weight, options.chunks, layer.label); };
  const auto apart = [&] { at::matmul(dtensor_meta(move(input, {Replicate{}}, layer.label.c_str()))->local, own_weight); };
  if (!overlaps(layer, options, "gathered", {apart, both})) return {};
  const auto [whole, product] = both();
  const auto& source = spec_of(input);
  const auto [x, readers] = entered_as(input, make_dtensor(whole, spec_like(source, Replicate{}, input.size(-1))));
  const auto spec = spec_like(source, of_features(placement_of(weight), input.dim()), weight.size(1));
  auto result = make_dtensor(product, spec);
  if (!needs_graph(x) && !needs_graph(weight)) return result;
  const auto context = context_of(layer, options, spec);
  context->readers = readers;
  std::optional<GatherAgain> again;
  if (needs_graph(weight)) {
    again.emplace(input, x, context->label);
    context->gathered = again->activation();
  }
  return gathered_in_graph(x, weight, result, context);
}

at::Tensor scattered_product(const ProductLayer& layer, const OverlapOptions& options) {
  const auto& weight = layer.weight;
  const auto goal = *layer.leaves;
  const auto input = entered(layer.input, layer.wanted, layer.label);
  const auto own = dtensor_meta(input)->local, own_weight = meta_of(weight, layer.label.c_str()).local;
  const auto sum = spec_like(spec_of(input), Partial{}, weight.size(1));
  const auto dim = *sequence_dim(goal, input.dim());
  const auto both = [&] {
    const SequenceChunks chunks(sum->mesh(), dim, input.size(dim), options.chunks);
    return noted(layer.label, *sum, goal, [&] { return scatter_product(own, own_weight, chunks, layer.label); });
  };
  const auto apart = [&] { move(make_dtensor(at::matmul(own, own_weight), sum), {goal}, layer.label.c_str()); };
  if (!overlaps(layer, options, "scattered", {apart, both})) return {};
  auto result = make_dtensor(both(), sum->with({goal}));
  if (!needs_graph(input) && !needs_graph(weight)) return result;
  return scattered_in_graph(input, weight, result, context_of(layer, options, dtensor_meta(result)->spec));
}

} // namespace

at::Tensor overlapped_product(const ProductLayer& layer, const OverlapOptions& options) {
  const auto &input = layer.input, &weight = layer.weight;
  const bool may = options.when != Overlap::kNever && input.is_floating_point() && input.dim() >= 2 && weight.dim() == 2 &&
                   input.numel() > 0 && weight.numel() > 0 && input.scalar_type() == weight.scalar_type() &&
                   spec_of(input).mesh().size() > 1 && input.size(-1) == weight.size(0) &&
                   !at::autocast::is_autocast_enabled(input.device().type());
  if (!may) return {};
  const auto& split = placement_of(weight);
  if (is_replicate(layer.wanted) && sequence_dim(placement_of(input), input.dim()) && shards_dim(split, 1))
    return gathered_product(layer, options);
  if (layer.leaves && sequence_dim(*layer.leaves, input.dim()) && shards_dim(split, 0)) return scattered_product(layer, options);
  return {};
}

} // namespace tessera::internal::parallel
