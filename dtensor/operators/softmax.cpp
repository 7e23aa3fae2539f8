#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>

#include <limits>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/rules/split_dims.h>

namespace tessera::internal::rules {

namespace {

/// All tensors have the same shape, and any dim may be split: along `dim` the ranks exchange one number a row.
Factorization same_shape(const OpCall& call) {
  auto factors = first_input_factors(call);
  for (auto& input : factors.inputs) input = factors.inputs[0];
  factors.outputs.push_back(factors.inputs[0]);
  return factors;
}

/// The type in which a softmax of `dtype` is computed.
at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype; }

int64_t dim_of(const LocalCall& call) {
  const auto ndim = call.inputs[0]->dim();
  const auto dim = call.find("dim")->toInt();
  return dim < 0 ? dim + ndim : dim;
}

/// The maximum and the sum of a row are reduced over the ranks that hold parts of it.
template <bool log>
void softmax_local(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  if (spec.dim() == 0 || !splits(spec, dim_of(call))) return call.op.callBoxed(*call.stack);
  const auto dim = dim_of(call);
  const auto& local = call.arg(0).toTensor();
  const bool to_float = call.find("half_to_float")->toBool();
  const auto x = local.to(wide(local.scalar_type()));
  auto one = x.sizes().vec();
  one[dim] = 1;
  const auto least = -std::numeric_limits<double>::infinity();
  auto largest = x.size(dim) > 0 ? x.amax(dim, true) : at::full(one, least, x.options());
  largest = reduce_over_split(largest, spec, dim, ReduceOp::kMax, "softmax");
  const auto shifted = x.sub(largest), powers = shifted.exp();
  const auto total = reduce_over_split(powers.sum(dim, true), spec, dim, ReduceOp::kSum, "softmax");
  const auto result = log ? shifted.sub(total.log()) : powers.div(total);
  call.finish_out(result.to(to_float ? at::kFloat : local.scalar_type()));
}

template <bool log>
void backward_local(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  if (spec.dim() == 0 || !splits(spec, dim_of(call))) return call.op.callBoxed(*call.stack);
  const auto dim = dim_of(call);
  const auto dtype = call.find("input_dtype")->toScalarType();
  const auto gradient = call.arg(0).toTensor().to(wide(dtype)), output = call.arg(1).toTensor().to(wide(dtype));
  const auto weighted = log ? gradient : gradient.mul(output);
  const auto total = reduce_over_split(weighted.sum(dim, true), spec, dim, ReduceOp::kSum, "softmax (backward)");
  call.finish_out(weighted.sub((log ? output.exp() : output).mul(total)).to(dtype));
}

} // namespace

void register_softmax(Registry& registry) {
  registry.add("_softmax", OnLocals(same_shape).run(softmax_local<false>, KernelKind::kAnyOffsets));
  registry.add("_log_softmax", OnLocals(same_shape).run(softmax_local<true>, KernelKind::kAnyOffsets));
  registry.add("_softmax_backward_data", OnLocals(same_shape).run(backward_local<false>, KernelKind::kAnyOffsets));
  registry.add("_log_softmax_backward_data", OnLocals(same_shape).run(backward_local<true>, KernelKind::kAnyOffsets));
}

} // namespace tessera::internal::rules
