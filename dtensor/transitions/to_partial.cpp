#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <limits>

#include <tessera/dtensor/transitions/transition.h>

namespace tessera::internal::redistribute {

at::Scalar neutral_value(Partial::Op op, at::ScalarType dtype) {
  const auto bound = [dtype](bool largest) -> at::Scalar {
    if (at::isFloatingType(dtype)) return (largest ? 1.0 : -1.0) * std::numeric_limits<double>::infinity();
    switch (dtype) {
      case at::kBool: return largest;
      case at::kByte: return largest ? 255 : 0;
      case at::kChar: return largest ? 127 : -128;
      case at::kShort: return largest ? 32767 : -32768;
      case at::kInt: return largest ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min();
      case at::kLong: return largest ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
      default: TORCH_CHECK(false, "dtype ", dtype, " has no largest value");
    }
  };
  switch (op) {
    case Partial::Op::kMin: return bound(true);
    case Partial::Op::kMax: return bound(false);
    case Partial::Op::kProduct: return 1;
    default: return 0;
  }
}

namespace {

/// The same on every rank: ranks that do not see the same values agree.
bool has_negative(const at::Tensor& local, const Transition& transition) {
  const auto negative = local.lt(0).any();
  if (!transition.parts_differ) return negative.item<bool>();
  const auto flag = negative.to(at::kByte).view({1});
  transition.mesh.flatten().communicator()->all_reduce(flag, ReduceOp::kMax, transition.label).wait();
  return flag.item<bool>();
}

} // namespace

at::Tensor to_partial(const at::Tensor& local, const Transition& transition) {
  const auto& partial = std::get<Partial>(transition.to);
  const auto neutral = neutral_value(partial.op, local.scalar_type());
  if (is_replicate(transition.from)) {
    const bool asks_sign = is_norm(transition.to) && !transition.signs_checked;
    TORCH_CHECK(!asks_sign || !has_negative(local, transition), transition.label,
                ": a tensor with negative values cannot be turned into a ", to_string(transition.to), ", which has no sign");
    const bool any_rank_may_hold_it =
        partial.op == Partial::Op::kAvg || partial.op == Partial::Op::kMin || partial.op == Partial::Op::kMax;
    return any_rank_may_hold_it || transition.rank() == 0 ? local : at::full_like(local, neutral);
  }
  const bool has_average = (local.is_floating_point() && local.scalar_type() != at::kHalf) || local.is_complex();
  TORCH_CHECK(partial.op != Partial::Op::kAvg || has_average, transition.label, ": a ", to_string(transition.from), " tensor of ",
              local.scalar_type(), " cannot be turned into a ", to_string(transition.to), ", which that type may not hold");
  auto whole = at::full(transition.sizes, neutral, local.options());
  auto mine = part_of(whole, transition.from, transition.ranks(), transition.rank());
  mine.copy_(partial.op == Partial::Op::kAvg ? local.mul(transition.ranks()) : local);
  return whole;
}

} // namespace tessera::internal::redistribute
