#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>
#include <tessera/dtensor/rules/split_dims.h>

namespace tessera::internal::rules {

namespace {

int64_t class_dim(const std::vector<int64_t>& sizes) { return sizes.size() == 1 ? 0 : 1; }

/// Factors of self [batch…] with the classes in dim 1, for self, target and weight; results without them are not split, as the
/// kernel reduces them.
struct ClassFactors {
  TensorDims self, target, weight;
};

ClassFactors class_factors(Factorization& factors, const std::vector<int64_t>& sizes) {
  ClassFactors dims;
  dims.self = fresh_dims(factors, sizes);
  for (auto& factor : factors.factors) factor.reduction = Replicate{};
  const auto classes = class_dim(sizes);
  dims.target = dims.self;
  dims.target.factors.erase(dims.target.factors.begin() + classes);
  dims.target.sizes.erase(dims.target.sizes.begin() + classes);
  dims.weight = {{dims.self.factors[classes]}, {sizes[classes]}};
  return dims;
}

/// self, target, weight → loss, total weight. The classes may be split: no rank gathers them.
Factorization nll_loss(const OpCall& call) {
  Factorization factors;
  const auto dims = class_factors(factors, call.tensors[0].sizes);
  factors.inputs = {dims.self, dims.target, call.tensors[2].defined ? dims.weight : TensorDims{}};
  const bool none = call.integer("reduction", at::Reduction::Mean) == at::Reduction::None;
  factors.outputs = {none ? dims.target : TensorDims{}, TensorDims{}};
  factors.ragged = RaggedUse::kNone;
  return factors;
}

/// gradient, self, target, weight, total weight → gradient of self.
Factorization nll_loss_backward(const OpCall& call) {
  Factorization factors;
  const auto dims = class_factors(factors, call.tensors[1].sizes);
  const bool none = call.integer("reduction", at::Reduction::Mean) == at::Reduction::None;
  factors.inputs = {none ? dims.target : whole_dims(call.tensors[0].sizes), dims.self, dims.target,
                    call.tensors[3].defined ? dims.weight : TensorDims{}, whole_dims(call.tensors[4].sizes)};
  factors.outputs = {dims.self};
  factors.ragged = RaggedUse::kNone;
  return factors;
}

/// What this rank's classes say about the targets.
struct ClassTargets {
  int64_t classes; ///< the dim
  at::Tensor mine; ///< which targets are among this rank's classes, and count
  at::Tensor index;
  at::Tensor weight;  ///< 0 where not `mine`
  at::Tensor invalid; ///< how many are no class at all
};

ClassTargets find_targets(const Spec& self, const at::Tensor& local, const at::Tensor& labels, const at::Tensor& weight,
                          int64_t ignored) {
  const auto target = labels.to(at::kLong); // bytes hold no negative `ignored`, and index nothing
  ClassTargets result;
  result.classes = class_dim(self.sizes());
  const auto offset = self.local_offsets()[result.classes], count = local.size(result.classes);
  const auto counted = target.ne(ignored);
  result.mine = counted.logical_and(target.ge(offset)).logical_and(target.lt(offset + count));
  result.invalid = counted.logical_and(target.lt(0).logical_or(target.ge(self.sizes()[result.classes]))).sum();
  result.index = at::where(result.mine, target.sub(offset), 0);
  auto weights = at::ones_like(target, local.options());
  if (weight.defined() && count > 0) weights = weight.index_select(0, result.index.reshape(-1)).view_as(target);
  result.weight = at::where(result.mine, weights, 0.0).to(local.dtype());
  return result;
}

void check_targets(const LocalCall& call, const at::Tensor& invalid, const Spec& self) {
  if (invalid.is_meta()) return;
  const auto count = invalid.item<double>();
  TORCH_CHECK_INDEX(count == 0, call.op.operator_name().name, ": ", count, " targets are not among the ",
                    self.sizes()[class_dim(self.sizes())], " classes");
}

at::Tensor optional_tensor(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }

void nll_loss_local(const LocalCall& call) {
  const auto& spec = *call.inputs[0];
  if (!splits(spec)) return call.op.callBoxed(*call.stack);
  const auto& local = call.arg(0).toTensor();
  const auto reduction = call.find("reduction")->toInt();
  const auto targets =
      find_targets(spec, local, call.arg(1).toTensor(), optional_tensor(call.arg(2)), call.find("ignore_index")->toInt());
  auto losses = at::zeros_like(targets.weight);
  if (local.size(targets.classes) > 0) {
    const auto picked = local.movedim(targets.classes, -1).gather(-1, targets.index.unsqueeze(-1)).squeeze(-1);
    losses = at::where(targets.mine, picked.neg().mul(targets.weight), losses);
  }
  auto loss = losses, total = at::zeros({}, local.options());
  if (reduction == at::Reduction::None) {
    check_targets(call, targets.invalid, spec);
    loss = reduce_over_split(losses, spec, targets.classes, ReduceOp::kSum, "nll_loss");
  } else {
    const auto dtype = local.scalar_type();
    const auto summed = at::isReducedFloatingType(dtype) ? at::kFloat : dtype; // a sum may be too large where the mean is not
    const auto sums = at::stack({losses.sum(summed), targets.weight.sum(summed), targets.invalid.to(summed)});
    const auto sum = reduce_over_split(sums, spec, std::nullopt, ReduceOp::kSum, "nll_loss");
    check_targets(call, sum[2], spec);
    total = sum[1].to(dtype, /*non_blocking=*/false, /*copy=*/true);
    loss = (reduction == at::Reduction::Mean ? sum[0].div(sum[1]) : sum[0].clone()).to(dtype);
  }
  call.stack->resize(call.begin());
  call.stack->emplace_back(std::move(loss));
  call.stack->emplace_back(std::move(total));
}

void nll_loss_backward_local(const LocalCall& call) {
  const auto& spec = *call.inputs[1];
  if (!splits(spec)) return call.op.callBoxed(*call.stack);
  const auto& local = call.arg(1).toTensor();
  const auto targets =
      find_targets(spec, local, call.arg(2).toTensor(), optional_tensor(call.arg(3)), call.find("ignore_index")->toInt());
  auto coefficients = targets.weight.neg().mul(call.arg(0).toTensor());
  if (call.find("reduction")->toInt() == at::Reduction::Mean) {
    coefficients = coefficients.div(call.find("total_weight")->toTensor());
  }
  coefficients = at::where(targets.mine, coefficients, 0.0).to(local.dtype());
  auto gradient = at::zeros(local.sizes(), local.options());
  if (local.size(targets.classes) > 0) {
    gradient.movedim(targets.classes, -1).scatter_(-1, targets.index.unsqueeze(-1), coefficients.unsqueeze(-1));
  }
  call.finish(gradient);
}

/// Elementwise losses: their sum over split dims is Partial; a mean is a sum over the count.
Factorization elementwise_loss(const OpCall& call) {
  auto factors = pointwise_factors(call);
  if (call.integer("reduction", at::Reduction::Mean) == at::Reduction::None) return factors;
  for (auto& factor : factors.factors) factor.reduction = Partial{};
  factors.outputs.assign(1, TensorDims{});
  factors.strides.clear();
  return factors;
}

/// The elements of what the operands broadcast to.
int64_t broadcast_numel(const LocalCall& call) {
  std::vector<int64_t> sizes;
  for (const auto& spec : call.inputs) {
    if (spec) sizes = at::infer_size(sizes, spec->sizes());
  }
  return product(sizes, 0, sizes.size());
}

/// The dtype of all floating-point arguments where that is a half, and none of them is written.
std::optional<at::ScalarType> common_half(const LocalCall& call) {
  std::optional<at::ScalarType> common;
  for (size_t i = call.begin(); i < call.stack->size(); ++i) {
    const auto& value = (*call.stack)[i];
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const auto dtype = value.toTensor().scalar_type();
    if (!at::isReducedFloatingType(dtype) || dtype != common.value_or(dtype)) return std::nullopt;
    common = dtype;
  }
  return call.op.schema().is_mutable() ? std::nullopt : common;
}

/// A mean over `count` elements is computed as a sum over this rank's part, divided by that: of halves in float, since their sum
/// may be too large for them where the mean is not.
void mean_as_sum(const LocalCall& call, int64_t count) {
  auto& reduction = *call.find("reduction");
  if (reduction.toInt() != at::Reduction::Mean) return call.op.callBoxed(*call.stack);
  reduction = static_cast<int64_t>(at::Reduction::Sum);
  const auto half = common_half(call);
  for (size_t i = call.begin(); half && i < call.stack->size(); ++i) {
    auto& value = (*call.stack)[i];
    if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().to(at::kFloat);
  }
  call.op.callBoxed(*call.stack);
  auto result = call.stack->back().toTensor().div_(static_cast<double>(count));
  if (half) call.stack->back() = result.to(*half);
}

void loss_local(const LocalCall& call) { mean_as_sum(call, broadcast_numel(call)); }

/// PyTorch's formulas divide by the elements of `self`, also where that is broadcast.
void loss_backward_local(const LocalCall& call) { mean_as_sum(call, call.inputs[1]->numel()); }

} // namespace

void register_losses(Registry& registry) {
  registry.add("nll_loss_forward. nll_loss2d_forward.", OnLocals(nll_loss).run(nll_loss_local));
  registry.add("nll_loss_backward. nll_loss2d_backward.", OnLocals(nll_loss_backward).run(nll_loss_backward_local));
  registry.add("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss",
               OnLocals(elementwise_loss).run(loss_local));
  registry.add(
      "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward",
      OnLocals(pointwise_factors).run(loss_backward_local));
}

} // namespace tessera::internal::rules
