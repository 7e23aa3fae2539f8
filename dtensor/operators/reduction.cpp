#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/rules/touched_rows.h>
#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::rules {

namespace {

/// The dims that "dim" names; all of them without it, or with an empty one. `reduction`: what an output is when one of them is
/// split; none: it must not be.
Factorization reduce(const OpCall& call, std::optional<Partial> reduction, OpSet flows) {
  auto factors = first_input_factors(call);
  const bool all = call.integers("dim").empty();
  const auto named = call.named_dims("dim");
  const bool keep = call.flag("keepdim", false);
  TensorDims output;
  for (size_t d = 0; d < named.size(); ++d) {
    if (!all && !named[d]) {
      output.add(static_cast<int>(d), call.tensors[0].sizes[d]);
      continue;
    }
    factors.factors[d].reduction = reduction;
    if (!reduction) factors.inputs[0].factors[d] = kNoFactor;
    if (keep) output.add(kNoFactor, 1);
  }
  const bool completes_rows = !call.schema.arguments().back().is_out() && product(call.tensors[0].sizes, 0, named.size()) > 0;
  if (reduction && output.sizes.empty()) {
    factors.ragged = RaggedUse::kMerged;
  } else if (reduction && completes_rows) {
    factors.ragged = RaggedUse::kReduced;
  }
  factors.outputs.resize(call.output_count(), output);
  // The kernel casts to `dtype` before it reduces.
  const auto from = call.tensors[0].dtype;
  const auto to = static_cast<at::ScalarType>(call.integer("dtype", static_cast<int64_t>(from)));
  factors.partial.push_back(flow({0}, flows & kept_by_cast(from, to)));
  return factors;
}

/// Whether some, or all, are true. The greatest of the ranks' values says so of booleans alone: of others -1 is true and less.
Factorization truth(const OpCall& call, Partial::Op op) {
  const auto* dims = call.find("dim");
  if (dims && dims->isIntList() && dims->toIntList().empty()) return pointwise_factors(call); // unlike other reductions
  const auto dtype = call.tensors[0].dtype;
  return reduce(call, Partial{op}, dtype == at::kBool || dtype == at::kByte ? OpSet(op) : OpSet{});
}

/// Partial products of complex numbers cannot be reduced.
Factorization product_of(const OpCall& call) {
  const auto reduction = at::isComplexType(call.tensors[0].dtype) ? std::nullopt : std::optional(Partial{Partial::Op::kProduct});
  return reduce(call, reduction, Partial::Op::kProduct);
}

/// The p of an order-p norm.
template <typename Call>
double order_of(const Call& call) {
  const c10::IValue* order = call.find("p") ? call.find("p") : call.find("ord");
  return order && order->isScalar() ? order->toScalar().toDouble() : 2.0;
}

/// An order-p norm; clip_grad_norm_ takes the norm of norms, which stays Partial(norm).
Factorization norm(const OpCall& call) {
  const double p = order_of(call);
  if (p == std::numeric_limits<double>::infinity()) return reduce(call, Partial{Partial::Op::kMax}, {});
  if (p == -std::numeric_limits<double>::infinity()) {
    auto factors = reduce(call, Partial{Partial::Op::kMin}, {});
    if (factors.ragged == RaggedUse::kReduced) factors.ragged = RaggedUse::kRows; // zeros complete the rows of the others
    return factors;
  }
  if (p == 0) return reduce(call, Partial{Partial::Op::kSum}, {});
  if (p < 0) return reduce(call, std::nullopt, {});
  const Partial partial{Partial::Op::kNorm, p};
  const auto& placements = call.tensors[0].spec->placements();
  const bool same = std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    return !is_partial(placement) || std::get<Partial>(placement) == partial;
  });
  return reduce(call, partial, same ? OpSet{Partial::Op::kNorm} : OpSet{});
}

/// Where all dims are named, and a RaggedShard merges some: the dims of this rank's part.
void name_merged_dims(const LocalCall& call) {
  const auto ndim = call.arg(0).toTensor().dim();
  if (ndim == call.inputs[0]->dim()) return;
  auto* named = call.find("dim");
  if (!named || !named->isIntList() || named->toIntList().empty()) return;
  std::vector<int64_t> dims(ndim);
  std::iota(dims.begin(), dims.end(), 0);
  *named = std::move(dims);
}

void reduce_local(const LocalCall& call) {
  name_merged_dims(call);
  call.op.callBoxed(*call.stack);
}

/// The sum over this rank's part divided by the global count, so that uneven shards add up.
void mean_local(const LocalCall& call) {
  name_merged_dims(call);
  const auto *dim = call.find("dim"), *keep = call.find("keepdim");
  const auto dims = dim ? dim->toOptional<std::vector<int64_t>>() : std::nullopt;
  const auto& local = call.arg(0).toTensor();
  const auto dtype = call.find("dtype")->toOptional<at::ScalarType>().value_or(local.scalar_type());
  const bool is_half = at::isReducedFloatingType(dtype); // whose sum may be too large for it, where the mean is not
  const auto total =
      at::sum(local, at::OptionalIntArrayRef(dims), keep && keep->toBool(), is_half ? at::kFloat : std::optional(dtype));
  const auto& kept = call.outputs[0].sizes;
  const auto results = std::max<int64_t>(1, product(kept, 0, kept.size()));
  call.finish_out(total.div_(static_cast<double>(call.inputs[0]->numel()) / static_cast<double>(results)).to(dtype));
}

/// This rank holds nothing of what is reduced, but no reduced dim is empty as a whole: the kernel would refuse on this rank
/// alone.
bool part_is_empty(const LocalCall& call) {
  if (call.arg(0).toTensor().numel() > 0) return false;
  const auto& sizes = call.inputs[0]->sizes();
  const auto* argument = call.find("dim");
  std::vector<int64_t> dims;
  if (argument && argument->isInt()) dims = {argument->toInt()};
  if (argument && argument->isIntList()) dims = argument->toIntVector();
  if (dims.empty()) return call.inputs[0]->numel() > 0;
  return std::all_of(dims.begin(), dims.end(),
                     [&](int64_t dim) { return sizes.empty() || sizes[dim < 0 ? dim + sizes.size() : dim] > 0; });
}

/// An extremum over an empty part is the value that loses to every other.
template <bool largest>
void extremum_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  if (!part_is_empty(call)) return reduce_local(call);
  const auto& sizes = call.outputs[0].local_sizes;
  auto result = at::full(sizes, redistribute::neutral_value(largest ? Partial::Op::kMax : Partial::Op::kMin, local.scalar_type()),
                         local.options());
  call.finish_out(result);
}

/// Norms of order ±inf of an empty part.
void norm_local(const LocalCall& call) {
  const auto& local = call.arg(0).toTensor();
  const double p = order_of(call);
  if (!std::isinf(p) || !part_is_empty(call)) return reduce_local(call);
  auto options = local.options();
  const auto* dtype = call.find("dtype");
  if (dtype && !dtype->isNone()) options = options.dtype(dtype->toScalarType());
  auto result = at::full(call.outputs[0].local_sizes, p > 0 ? 0.0 : std::numeric_limits<double>::infinity(),
                         options.dtype(c10::toRealValueType(c10::typeMetaToScalarType(options.dtype()))));
  call.finish_out(result);
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

void operator_local(const LocalCall& call) { call.op.callBoxed(*call.stack); }

/// A part of a RaggedShard may end inside a row. `kernel` reduces the rows that it touches, completed by what changes no
/// reduction by `op`; so do the ranks that hold the rest of them.
template <LocalKernel kernel, Partial::Op op>
void by_rows(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  const auto& output = call.outputs[0];
  if (!spec.ragged() || spec.ragged()->dim == 0 || output.sizes.empty()) return kernel(call);
  const auto fill = [](const at::Tensor& tensor) { return redistribute::neutral_value(op, tensor.scalar_type()); };
  const TouchedRows rows(spec);
  auto& local = call.arg(0);
  local = rows.completed(local.toTensor(), fill(local.toTensor()));
  kernel(call);
  const auto result = call.stack->back().toTensor();
  call.stack->back() = rows.result(result, output, fill(result));
}

Factorize reduction(std::optional<Partial> partial, OpSet flows) {
  return [=](const OpCall& call) { return reduce(call, partial, flows); };
}

} // namespace

void register_reductions(Registry& registry) {
  using Op = Partial::Op;
  constexpr auto kAnyOffsets = KernelKind::kAnyOffsets;
  registry.add("sum", OnLocals(reduction(Partial{Op::kSum}, kLinearOps)).run(by_rows<reduce_local, Op::kSum>, kAnyOffsets));
  // NaN on one rank is NaN in the sum over ranks.
  registry.add("nansum count_nonzero",
               OnLocals(reduction(Partial{Op::kSum}, {})).run(by_rows<reduce_local, Op::kSum>, kAnyOffsets));
  registry.add("mean", OnLocals(reduction(Partial{Op::kSum}, kLinearOps)).run(by_rows<mean_local, Op::kSum>));
  registry.add("prod", OnLocals(product_of).run(by_rows<operator_local, Op::kProduct>, kAnyOffsets));
  registry.add("amax max. max.unary_out",
               OnLocals(reduction(Partial{Op::kMax}, Op::kMax)).run(by_rows<extremum_local<true>, Op::kMax>));
  registry.add("amin min. min.unary_out",
               OnLocals(reduction(Partial{Op::kMin}, Op::kMin)).run(by_rows<extremum_local<false>, Op::kMin>));
  registry.add("any", OnLocals([](const OpCall& call) {
                        return truth(call, Op::kMax);
                      }).run(by_rows<reduce_local, Op::kSum>, kAnyOffsets));
  registry.add("all", OnLocals([](const OpCall& call) {
                        return truth(call, Op::kMin);
                      }).run(by_rows<reduce_local, Op::kProduct>, kAnyOffsets));
  registry.add("norm linalg_vector_norm", OnLocals(norm).run(by_rows<norm_local, Op::kSum>).with(Trait::kStaticScalars));
  registry.add("_foreach_norm", OnLocals(norm).run(foreach_norm_local).with({Trait::kListElements, Trait::kStaticScalars}));
  registry.add(
      "max.dim max.dim_max min.dim min.dim_min argmax argmin logsumexp median nanmedian mode kthvalue aminmax var.correction "
      "std.correction var_mean.correction std_mean.correction",
      OnLocals(reduction(std::nullopt, {})));
}

} // namespace tessera::internal::rules
