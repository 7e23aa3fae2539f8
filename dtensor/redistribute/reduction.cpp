#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <tessera/dtensor/redistribute/transition.h>

namespace tessera::internal::redistribute {

namespace {

/// Bytes stand for truth values; averages of halves are taken in float, where the communicator would divide before it adds.
at::ScalarType wire_type(at::ScalarType dtype, const Partial& partial, const Communicator& communicator) {
  if (dtype == at::kBool) return at::kByte;
  return partial.op == Partial::Op::kAvg && !communicator.averages(dtype) ? at::kFloat : dtype;
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
  const auto op = wire_op(partial, values.scalar_type());
  TORCH_CHECK(!values.is_complex() || op == ReduceOp::kSum || op == ReduceOp::kAvg,
              "Partial of complex tensors is sum or avg only");
  const auto real = values.is_complex() ? at::view_as_real(values) : values;
  return real.to(wire_type(real.scalar_type(), partial, communicator), /*non_blocking=*/false, /*copy=*/true,
                 at::MemoryFormat::Contiguous);
}

at::Tensor decode(const at::Tensor& reduced, const Partial& partial, at::ScalarType dtype) {
  if (partial.op == Partial::Op::kNorm) return reduced.pow(1.0 / partial.norm_p).to(dtype);
  if (at::isComplexType(dtype)) return at::view_as_complex(reduced.to(c10::toRealValueType(dtype)));
  return reduced.to(dtype);
}

} // namespace tessera::internal::redistribute
