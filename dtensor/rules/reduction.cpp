#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tessera/dtensor/redistribute/transition.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

/// The dims that a call reduces; all of them without a dim argument, or with an empty one.
std::vector<bool> reduced_dims(const OpCall& call) {
  const auto ndim = static_cast<int64_t>(call.tensors[0].sizes.size());
  auto dims = call.integers("dim");
  std::vector<bool> reduced(ndim, dims.empty());
  for (auto dim : dims) {
    const auto bound = std::max<int64_t>(ndim, 1);
    TORCH_CHECK_INDEX(dim >= -bound && dim < bound, call.name, ": dimension ", dim, " is out of range for a tensor of ", ndim,
                      " dims");
    if (ndim > 0) reduced[dim < 0 ? dim + ndim : dim] = true;
  }
  return reduced;
}

/// `reduction`: what an output is when a reduced dim is split; none: it must not be.
Factorization reduce(const OpCall& call, std::optional<Partial> reduction, OpSet flows) {
  auto factors = first_input_factors(call);
  const auto reduced = reduced_dims(call);
  const bool keep = call.flag("keepdim", false);
  TensorDims output;
  for (size_t d = 0; d < reduced.size(); ++d) {
    if (!reduced[d]) {
      output.factors.push_back(static_cast<int>(d));
      output.sizes.push_back(call.tensors[0].sizes[d]);
      continue;
    }
    factors.factors[d].reduction = reduction;
    if (!reduction) factors.inputs[0].factors[d] = kNoFactor;
    if (keep) {
      output.factors.push_back(kNoFactor);
      output.sizes.push_back(1);
    }
  }
  factors.merges_leading = reduction && output.sizes.empty();
  factors.outputs.resize(call.output_count(), output);
  if (flows) factors.partial.push_back(flow(1, flows));
  return factors;
}

/// An order-p norm; clip_grad_norm_ takes the norm of norms, which stays Partial(norm).
Factorization norm(const OpCall& call) {
  const auto* order = call.find("p") ? call.find("p") : call.find("ord");
  const double p = order && order->isScalar() ? order->toScalar().toDouble() : 2.0;
  if (p == std::numeric_limits<double>::infinity()) return reduce(call, Partial{Partial::Op::kMax}, 0);
  if (p == -std::numeric_limits<double>::infinity()) return reduce(call, Partial{Partial::Op::kMin}, 0);
  if (p == 0) return reduce(call, Partial{Partial::Op::kSum}, 0);
  if (p < 0) return reduce(call, std::nullopt, 0);
  const Partial partial{Partial::Op::kNorm, p};
  const auto& placements = call.tensors[0].spec->placements();
  const bool same = std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    return !is_partial(placement) || std::get<Partial>(placement) == partial;
  });
  return reduce(call, partial, same ? ops({Partial::Op::kNorm}) : OpSet{0});
}

double count_reduced(const LocalCall& call) {
  const auto numel = [](const std::vector<int64_t>& sizes) {
    double result = 1;
    for (const auto size : sizes) result *= static_cast<double>(size);
    return result;
  };
  return numel(call.inputs[0]->sizes()) / std::max(1.0, numel(call.outputs[0].sizes));
}

/// The sum over this rank's part divided by the global count, so that uneven shards add up.
void mean_local(const LocalCall& call) {
  const auto local = call.arg(0).toTensor();
  const int dim = call.find("dim"), keep = call.find("keepdim"), dtype = call.find("dtype");
  std::optional<at::ScalarType> type;
  if (dtype >= 0 && !call.arg(dtype).isNone()) type = call.arg(dtype).toScalarType();
  std::optional<std::vector<int64_t>> dims;
  if (dim >= 0 && !call.arg(dim).isNone()) dims = call.arg(dim).toIntVector();
  auto total = dims ? at::sum(local, *dims, keep >= 0 && call.arg(keep).toBool(), type) : at::sum(local, type);
  total.div_(count_reduced(call));
  const int out = call.find("out");
  call.finish(out >= 0 ? call.arg(out).toTensor().copy_(total) : total);
}

/// An extremum over an empty part is the value that loses to every other.
template <bool largest>
void extremum_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  if (local.numel() > 0 || call.inputs[0]->numel() == 0) return call.op.callBoxed(*call.stack);
  auto sizes = call.outputs[0].local_sizes;
  auto result = at::full(sizes, redistribute::neutral_value(largest ? Partial::Op::kMax : Partial::Op::kMin, local.scalar_type()),
                         local.options());
  const int out = call.find("out");
  call.finish(out >= 0 ? call.arg(out).toTensor().copy_(result) : result);
}

/// Norms of order ±inf of an empty part.
void norm_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  const int order = std::max(call.find("p"), call.find("ord"));
  const double p = order >= 0 && call.arg(order).isScalar() ? call.arg(order).toScalar().toDouble() : 2.0;
  if (local.numel() > 0 || !std::isinf(p) || call.inputs[0]->numel() == 0) return call.op.callBoxed(*call.stack);
  auto options = local.options();
  const int dtype = call.find("dtype");
  if (dtype >= 0 && !call.arg(dtype).isNone()) options = options.dtype(call.arg(dtype).toScalarType());
  auto result = at::full(call.outputs[0].local_sizes, p > 0 ? 0.0 : std::numeric_limits<double>::infinity(),
                         options.dtype(c10::toRealValueType(c10::typeMetaToScalarType(options.dtype()))));
  const int out = call.find("out");
  call.finish(out >= 0 ? call.arg(out).toTensor().copy_(result) : result);
}

/// The kernel refuses an infinite norm of a part without elements: one that changes no maximum or minimum stands in.
void foreach_norm_local(const LocalCall& call) {
  const double p = call.arg(1).toScalar().toDouble();
  const auto list = call.arg(0).toTensorList();
  for (size_t i = 0; std::isinf(p) && i < list.size(); ++i) {
    const at::Tensor& local = list.get(i);
    if (local.numel() > 0 || call.inputs[i]->numel() == 0) continue;
    list.set(i, at::full({1}, p > 0 ? 0.0 : std::numeric_limits<double>::infinity(), local.options()));
  }
  call.op.callBoxed(*call.stack);
}

Factorize reduction(std::optional<Partial> partial, OpSet flows) {
  return [=](const OpCall& call) { return reduce(call, partial, flows); };
}

} // namespace

void register_reductions(Registry& registry) {
  using Op = Partial::Op;
  registry.add("sum nansum", {.factorize = reduction(Partial{Op::kSum}, kLinearOps)});
  registry.add("count_nonzero", {.factorize = reduction(Partial{Op::kSum}, 0)});
  registry.add("mean", {.factorize = reduction(Partial{Op::kSum}, kLinearOps), .local = mean_local});
  registry.add("prod", {.factorize = reduction(Partial{Op::kProduct}, ops({Op::kProduct}))});
  registry.add("amax max. max.unary_out",
               {.factorize = reduction(Partial{Op::kMax}, ops({Op::kMax})), .local = extremum_local<true>});
  registry.add("amin min. min.unary_out",
               {.factorize = reduction(Partial{Op::kMin}, ops({Op::kMin})), .local = extremum_local<false>});
  registry.add("any", {.factorize = reduction(Partial{Op::kMax}, ops({Op::kMax}))});
  registry.add("all", {.factorize = reduction(Partial{Op::kMin}, ops({Op::kMin}))});
  registry.add("norm linalg_vector_norm", {.factorize = norm, .local = norm_local, .static_scalars = true});
  registry.add("_foreach_norm", {.factorize = norm, .local = foreach_norm_local, .foreach = true, .static_scalars = true});
  registry.add(
      "max.dim max.dim_max min.dim min.dim_min argmax argmin logsumexp median nanmedian mode kthvalue aminmax var.correction "
      "std.correction var_mean.correction std_mean.correction",
      {.factorize = reduction(std::nullopt, 0)});
}

} // namespace tessera::rules
