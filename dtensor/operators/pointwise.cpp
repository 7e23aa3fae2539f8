#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

namespace {

constexpr OpSet kSharedOps{Partial::Op::kAvg, Partial::Op::kMin, Partial::Op::kMax}; // x → R when every rank holds x

struct Family {
  std::string_view names;
  absl::InlinedVector<PartialFlow, 2> flows; ///< the Partial inputs that the result is linear (or monotone) in
};

const Family kFamilies[] = {
    // Unary, and others without a Partial form.
    {"abs acos acosh angle asin asinh atan2 atan atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
     "bitwise_xor celu complex copysign cos cosh digamma elu eq erfinv floor_divide fmod frac gcd ge gelu gt hardswish heaviside "
     "hypot i0 igamma igammac isinf isnan isneginf isposinf lcm le lgamma logical_and logical_not logical_or "
     "logical_xor leaky_relu log log10 log1p log2 logit lt masked_fill mish ne nextafter nan_to_num polar pow reciprocal "
     "remainder round rsqrt selu sgn sign signbit silu sin sinc sinh softplus sqrt softshrink hardshrink special_entr "
     "special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta _prelu_kernel "
     "_prelu_kernel_backward square tan threshold xlogy float_power",
     {}},
    {"elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward "
     "log_sigmoid_backward hardshrink_backward softshrink_backward logit_backward mish_backward sigmoid_backward silu_backward "
     "softplus_backward tanh_backward threshold_backward",
     {flow({0}, kLinearOps)}},
    // Rising functions without NaN: the largest (smallest) of the ranks' values gives the largest (smallest) result.
    {"ceil erf exp exp2 expm1 floor hardsigmoid hardtanh relu relu6 sigmoid tanh trunc clamp. clamp_max. clamp_min.",
     {flow({0}, kOrderOps)}},
    // Adding a number keeps no sum, and keeping a maximum Partial for it would put off a reduction that clip_grad_norm_ then
    // needs twice.
    {"clamp clamp_max clamp_min add.Scalar sub.Scalar", {}},
    {"maximum", {flow(kEveryInput, Partial::Op::kMax)}},
    {"minimum", {flow(kEveryInput, Partial::Op::kMin)}},
    {"fmax fmin", {}}, // which pass over the NaN that a rank's part may be
    {"add sub rsub lerp", {flow(kEveryInput, kLinearOps)}},
    {"lerp.Tensor", {flow({0, 1}, kLinearOps)}},
    {"rsub.Scalar", {flow({0}, Partial::Op::kAvg)}},
    {"neg conj_physical deg2rad rad2deg", {flow({0}, kScaleOps)}},
    {"mul", {flow({0}, kScaleOps), flow({1}, kScaleOps)}},
    {"div.Tensor div.Scalar", {flow({0}, kScaleOps)}},
    {"div", {}},
    {"addcmul", {flow({0, 1}, kLinearOps), flow({0, 2}, kLinearOps)}},
    {"addcdiv", {flow({0, 1}, kLinearOps)}},
    {"where.self", {flow({1, 2}, kScaleOps)}},
    {"positive zero", {flow({0}, kAllOps)}},
    {"fill.Scalar", {flow({0}, kSharedOps)}},
};

Factorization cast_factors(const OpCall& call) {
  auto factors = pointwise_factors(call);
  const auto from = call.tensors[0].dtype;
  const auto to = static_cast<at::ScalarType>(call.integer("dtype", static_cast<int64_t>(from)));
  factors.partial.push_back(flow({0}, kept_by_cast(from, to)));
  const auto* device = call.find("device");
  TORCH_CHECK(!device || !device->isDevice() || device->toDevice().type() == call.mesh.device_type(), call.name,
              ": a DTensor stays on its mesh's device (", at::DeviceTypeName(call.mesh.device_type(), true), "), not ",
              device->toDevice().str(), "; use full_tensor() or to_local()");
  return factors;
}

/// Autograd's arithmetic with zeros that have no memory asks, below autograd, what shape its result has on the Meta device: that
/// is a plain tensor. A program's own conversion to that device comes as `_to_copy`.
void to_layout(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const auto& schema = op.schema();
  const auto argument = [&](const char* name) -> const c10::IValue& {
    return (*stack)[stack->size() - schema.arguments().size() + static_cast<size_t>(*schema.argumentIndexWithName(name))];
  };
  const auto& device = argument("device");
  if (!device.isDevice() || !device.toDevice().is_meta()) {
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }
  const auto& tensor = argument("self").toTensor();
  const auto& dtype = argument("dtype");
  auto shape = at::empty_strided(tensor.sizes(), tensor.strides(),
                                 at::device(at::kMeta).dtype(dtype.isInt() ? dtype.toScalarType() : tensor.scalar_type()));
  stack->resize(stack->size() - schema.arguments().size());
  stack->emplace_back(std::move(shape));
}

/// On CUDA the kernel leaves its buffer without elements, and its backward does not read it.
void log_sigmoid_local(const LocalCall& call) {
  const auto sizes = call.arg(0).toTensor().sizes().vec();
  call.op.callBoxed(*call.stack);
  auto& buffer = call.stack->back();
  if (buffer.toTensor().sizes() != sizes) buffer = at::empty({}, buffer.toTensor().options()).expand(sizes);
}

} // namespace

void register_pointwise(Registry& registry) {
  for (const auto& family : kFamilies) registry.add(family.names, OnLocals(elementwise(family.flows)));
  registry.add("clone", OnLocals(elementwise({flow({0}, kAllOps)})).run(run_in_format, KernelKind::kAnyOffsets));
  registry.add("_to_copy", OnLocals(cast_factors).run(run_in_format, KernelKind::kAnyOffsets));
  registry.add("log_sigmoid_forward", OnLocals(pointwise_factors).run(log_sigmoid_local, KernelKind::kAnyOffsets));
  registry.add("to.dtype_layout", Handler(to_layout));
  registry.add("fill.Tensor", OnLocals(copy_factors));
  registry.add("copy", OnLocals(copy_factors).with(Trait::kPlainIsReplicate));
}

} // namespace tessera::internal::rules
