#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <limits>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

namespace {

/// Bytes stand for truth values; averages of halves are taken in float, where the communicator would divide before it adds.
at::ScalarType wire_type(at::ScalarType dtype, const Partial& partial, const Communicator& communicator) {
  if (dtype == at::kBool) return at::kByte;
  return partial.op == Partial::Op::kAvg && !communicator.averages(dtype) ? at::kFloat : dtype;
}

/// Whether the ranks' numbers are compared: as integers of the same order, since NCCL passes over NaN.
bool compares_numbers(const Partial& partial, at::ScalarType dtype) {
  return at::isFloatingType(dtype) && (partial.op == Partial::Op::kMin || partial.op == Partial::Op::kMax);
}

int64_t largest(const at::Tensor& integers) {
  return integers.scalar_type() == at::kLong ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
}

/// From the bits of numbers to integers of their order, and back: of negative ones, those with larger bits are less.
at::Tensor reorder(const at::Tensor& bits) { return at::where(bits.lt(0), bits.bitwise_xor(largest(bits)), bits); }

/// NaN comes before all that it is compared with.
at::Tensor to_order(const at::Tensor& values, Partial::Op op) {
  const bool is_double = values.scalar_type() == at::kDouble;
  const auto numbers = values.to(is_double ? at::kDouble : at::kFloat);
  const auto order = reorder(numbers.view(is_double ? at::kLong : at::kInt));
  return order.masked_fill(numbers.isnan(), op == Partial::Op::kMax ? largest(order) : -largest(order) - 1);
}

at::Tensor from_order(const at::Tensor& order) {
  return reorder(order).view(order.scalar_type() == at::kLong ? at::kDouble : at::kFloat);
}

} // namespace

ReduceOp wire_op(const Partial& partial, at::ScalarType dtype) {
  const bool truths = dtype == at::kBool; // whose sum is "or" and whose product is "and", for any number of ranks
  switch (partial.op) {
    case Partial::Op::kSum:
    case Partial::Op::kMask: return truths ? ReduceOp::kMax : ReduceOp::kSum;
    case Partial::Op::kNorm: return ReduceOp::kSum;
    case Partial::Op::kAvg: return ReduceOp::kAvg;
    case Partial::Op::kMin: return ReduceOp::kMin;
    case Partial::Op::kMax: return ReduceOp::kMax;
    case Partial::Op::kProduct: return truths ? ReduceOp::kMin : ReduceOp::kProduct;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown reduction");
}

at::Tensor encode(const at::Tensor& values, const Partial& partial, const Communicator& communicator) {
  if (partial.op == Partial::Op::kNorm) return values.abs().to(at::kDouble).pow(partial.norm_p); // powers overflow narrow types
  if (compares_numbers(partial, values.scalar_type())) return to_order(values, partial.op);
  const auto op = wire_op(partial, values.scalar_type());
  TORCH_CHECK(!values.is_complex() || op == ReduceOp::kSum || op == ReduceOp::kAvg,
              "Partial of complex tensors is sum or avg only");
  const auto real = values.is_complex() ? at::view_as_real(values) : values;
  return real.to(wire_type(real.scalar_type(), partial, communicator), /*non_blocking=*/false, /*copy=*/true,
                 at::MemoryFormat::Contiguous);
}

at::Tensor decode(const at::Tensor& reduced, const Partial& partial, at::ScalarType dtype) {
  if (partial.op == Partial::Op::kNorm) return reduced.pow(1.0 / partial.norm_p).to(dtype);
  if (compares_numbers(partial, dtype)) return from_order(reduced).to(dtype);
  if (at::isComplexType(dtype)) return at::view_as_complex(reduced.to(c10::toRealValueType(dtype)));
  return reduced.to(dtype);
}

} // namespace tessera::internal::redistribute
