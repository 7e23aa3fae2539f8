#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <tessera/dtensor/redistribute/transition.h>

namespace tessera::internal::redistribute {

ReduceOp wire_op(const Partial& partial) {
  switch (partial.op) {
    case Partial::Op::kSum:
    case Partial::Op::kMask:
    case Partial::Op::kNorm: return ReduceOp::kSum;
    case Partial::Op::kAvg: return ReduceOp::kAvg;
    case Partial::Op::kMin: return ReduceOp::kMin;
    case Partial::Op::kMax: return ReduceOp::kMax;
    case Partial::Op::kProduct: return ReduceOp::kProduct;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown reduction");
}

at::Tensor encode(const at::Tensor& values, const Partial& partial) {
  if (partial.op == Partial::Op::kNorm) return values.abs().to(at::kDouble).pow(partial.norm_p); // powers overflow narrow types
  if (values.scalar_type() == at::kBool) return values.to(at::kByte);
  if (values.is_complex()) {
    const auto op = wire_op(partial);
    TORCH_CHECK(op == ReduceOp::kSum || op == ReduceOp::kAvg, "Partial of complex tensors is sum or avg only");
    return at::view_as_real(values).clone(at::MemoryFormat::Contiguous);
  }
  return values.clone(at::MemoryFormat::Contiguous);
}

at::Tensor decode(const at::Tensor& reduced, const Partial& partial, at::ScalarType dtype) {
  if (partial.op == Partial::Op::kNorm) return reduced.pow(1.0 / partial.norm_p).to(dtype);
  if (dtype == at::kBool) return reduced.to(at::kBool);
  if (at::isComplexType(dtype)) return at::view_as_complex(reduced);
  return reduced;
}

} // namespace tessera::internal::redistribute
