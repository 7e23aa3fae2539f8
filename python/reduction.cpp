#include "reduction.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

namespace tessera::python {

namespace {

at::Scalar factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement, "PREMUL_SUM has no factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item() : at::Scalar(supplement->double_factor);
}

} // namespace

Reduction::Reduction(const c10d::ReduceOp& op) {
  using c10d::ReduceOp;
  adds_ = op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM;
  switch (op.op_) {
    case ReduceOp::SUM: return;
    case ReduceOp::AVG: op_ = tessera::ReduceOp::kAvg; return;
    case ReduceOp::PRODUCT: op_ = tessera::ReduceOp::kProduct; return;
    case ReduceOp::MIN: op_ = tessera::ReduceOp::kMin; return;
    case ReduceOp::MAX: op_ = tessera::ReduceOp::kMax; return;
    case ReduceOp::BAND: combine_ = &at::Tensor::bitwise_and_; return;
    case ReduceOp::BOR: combine_ = &at::Tensor::bitwise_or_; return;
    case ReduceOp::BXOR: combine_ = &at::Tensor::bitwise_xor_; return;
    case ReduceOp::PREMUL_SUM: factor_ = factor_of(op); return;
    case ReduceOp::UNUSED: break;
  }
  TORCH_CHECK_VALUE(false, "the reduction ", static_cast<int>(op.op_), " is unknown");
}

void Reduction::check_dtype(const at::Tensor& tensor) const {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(!factor_ || at::isFloatingType(dtype) || at::isComplexType(dtype), "PREMUL_SUM of ", dtype,
                    " is not defined, of floating or complex numbers it is");
  TORCH_CHECK_VALUE(!combine_ || at::isIntegralType(dtype, /*includeBool=*/true), "BAND, BOR and BXOR of ", dtype,
                    " are not defined, of integers and bool they are");
}

at::Tensor Reduction::as_real(const at::Tensor& tensor) const {
  return adds_ && tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void Reduction::combine(Staging& staging, const at::Tensor& output, const at::Tensor& parts) const {
  staging.then([output, parts, combine = combine_] {
    output.copy_(parts.select(0, 0));
    for (int64_t rank = 1; rank < parts.size(0); ++rank) (output.*combine)(parts.select(0, rank));
  });
}

Work Reduction::all_reduce(Communicator& group, Staging& staging, const at::Tensor& tensor, std::string_view label) const {
  check_dtype(tensor);
  if (factor_) {
    const auto scaled = Staging::input(tensor.mul(*factor_));
    staging.copy_back(tensor, scaled);
    return group.all_reduce(as_real(scaled), op_, label);
  }
  const auto flat = staging.in_out(tensor);
  if (!combine_) return group.all_reduce(as_real(flat), op_, label);
  const auto parts = at::empty({group.size(), flat.numel()}, flat.options());
  combine(staging, flat.view(-1), parts);
  return group.all_gather_into(parts, flat, label);
}

Work Reduction::reduce_scatter(Communicator& group, Staging& staging, const at::Tensor& output, const at::Tensor& input,
                               std::string_view label) const {
  check_dtype(input);
  const auto flat = staging.output(output);
  auto source = factor_ ? Staging::input(input.mul(*factor_)) : Staging::input(input);
  if (!combine_) return group.reduce_scatter(as_real(flat), as_real(source), op_, label);
  const auto parts = at::empty({group.size(), flat.numel()}, flat.options());
  combine(staging, flat.view(-1), parts);
  return group.all_to_all(parts, source, {}, {}, label);
}

} // namespace tessera::python
