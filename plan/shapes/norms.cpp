// Norms: their results are as the input, and they keep a mean and a deviation of each thing that they normalize.

#include <tessera/plan/shapes/meta_library.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::internal::shapes {

namespace {

bool is_defined(const MaybeTensor& tensor) { return tensor && tensor->defined(); }

/// fp32 where a low precision meets parameters in fp32, and on CUDA always.
at::ScalarType dtype_of_statistics(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias) {
  const auto low = [](const Tensor& tensor) { return at::isReducedFloatingType(tensor.scalar_type()); };
  const bool is_mixed = (is_defined(weight) && !low(*weight)) || (is_defined(bias) && !low(*bias));
  const bool widens = is_mixed || device_behind_meta() == c10::DeviceType::CUDA;
  return low(input) && widens ? at::kFloat : input.scalar_type();
}

Three norm_of_last(const Tensor& input, IntArrayRef normalized, const MaybeTensor& weight, const MaybeTensor& bias, double) {
  TORCH_CHECK_VALUE(input.dim() >= static_cast<int64_t>(normalized.size()) &&
                        input.sizes().slice(static_cast<size_t>(input.dim()) - normalized.size()) == normalized,
                    "layer_norm: the input has the shape ", input.sizes(), ", whose end is not the normalized shape ",
                    normalized);
  const auto x = input.expect_contiguous(); // a copy takes memory while the operator runs
  auto statistics = input.sizes().vec();
  std::fill(statistics.end() - static_cast<std::ptrdiff_t>(normalized.size()), statistics.end(), 1);
  const auto dtype = dtype_of_statistics(input, weight, bias);
  return {empty_of(input, input.sizes()), empty_of(input, statistics, dtype), empty_of(input, statistics, dtype)};
}

Three layer_norm_backward(const Tensor& gradient, const Tensor& input, IntArrayRef, const Tensor&, const Tensor&,
                          const MaybeTensor& weight, const MaybeTensor& bias, std::array<bool, 3> wanted) {
  const auto dy = gradient.expect_contiguous();
  const auto x = input.expect_contiguous();
  return {gradient_like(input, wanted[0]), gradient_like(weight, wanted[1]), gradient_like(bias, wanted[2])};
}

/// CUDA's, which keeps one number for each thing that it normalizes; the CPU computes an RMS norm of other operators.
Two rms_norm(const Tensor& input, IntArrayRef normalized, const MaybeTensor& weight, std::optional<double>) {
  auto [out, mean, deviation] = norm_of_last(input, normalized, weight, std::nullopt, 0);
  return {std::move(out), std::move(deviation)};
}
Two rms_norm_backward(const Tensor& gradient, const Tensor& input, IntArrayRef, const Tensor&, const MaybeTensor& weight,
                      std::array<bool, 2> wanted) {
  const auto dy = gradient.expect_contiguous();
  const auto x = input.expect_contiguous();
  return {gradient_like(input, wanted[0]), gradient_like(weight, wanted[1])};
}

at::MemoryFormat format_of(const Tensor& input) { return input.suggest_memory_format(); }

Three group_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, int64_t n, int64_t, int64_t,
                 int64_t groups, double) {
  const auto x = input.contiguous(format_of(input));
  const auto dtype = dtype_of_statistics(input, weight, bias);
  return {at::empty_like(x, format_of(input)), empty_of(input, {n, groups}, dtype), empty_of(input, {n, groups}, dtype)};
}

Three group_norm_backward(const Tensor& gradient, const Tensor& input, const Tensor&, const Tensor&, const MaybeTensor& weight,
                          int64_t, int64_t channels, int64_t, int64_t, std::array<bool, 3> wanted) {
  const auto format = format_of(input);
  const auto dy = gradient.contiguous(format), x = input.contiguous(format);
  const auto& scale = is_defined(weight) ? *weight : input;
  const auto of_channel = [&](bool is_wanted) { return is_wanted ? empty_of(scale, {channels}) : Tensor(); };
  return {wanted[0] ? at::empty_like(x, format) : Tensor(), of_channel(wanted[1]), of_channel(wanted[2])};
}

Three batch_norm_of(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, bool training) {
  const auto statistics = training ? input.size(1) : 0;
  const auto dtype = training ? dtype_of_statistics(input, weight, bias) : input.scalar_type();
  return {at::empty_like(input, format_of(input)), empty_of(input, {statistics}, dtype), empty_of(input, {statistics}, dtype)};
}

Three batch_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor&, const MaybeTensor&,
                 bool training, double, double) {
  return batch_norm_of(input, weight, bias, training);
}
Three batch_norm_legit(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, Tensor&, Tensor&, bool training,
                       double, double) {
  return batch_norm_of(input, weight, bias, training);
}
Three batch_norm_without_running(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, bool training, double,
                                 double) {
  return batch_norm_of(input, weight, bias, training);
}

Two batch_norm_update(const Tensor& input, const MaybeTensor& mean, const MaybeTensor& variance, double) {
  const auto dtype = dtype_of_statistics(input, mean, variance);
  return {empty_of(input, {input.size(1)}, dtype), empty_of(input, {input.size(1)}, dtype)};
}

Three batch_norm_backward(const Tensor&, const Tensor& input, const MaybeTensor& weight, const MaybeTensor&, const MaybeTensor&,
                          const MaybeTensor&, const MaybeTensor&, bool, double, std::array<bool, 3> wanted) {
  const auto& scale = is_defined(weight) ? *weight : input;
  const auto of_channel = [&](bool is_wanted) { return is_wanted ? empty_of(scale, {input.size(1)}) : Tensor(); };
  return {wanted[0] ? at::empty_like(input, format_of(input)) : Tensor(), of_channel(wanted[1]), of_channel(wanted[2])};
}

/// As CUDA has a kernel of its own, and the CPU has none.
void choose_rms_norm(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto& input = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  const bool is_fused = input.is_meta() && device_behind_meta() == c10::DeviceType::CUDA;
  op.callBoxedForDispatchKey(is_fused ? c10::DispatchKey::Autograd : c10::DispatchKey::CompositeImplicitAutograd, *stack);
}

} // namespace

void add_choice_of_norms(MetaLibrary& autograd) {
  autograd.add("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&choose_rms_norm>());
}

void add_norms(MetaLibrary& library) {
  library.add("native_layer_norm", norm_of_last);
  library.add("native_layer_norm_backward", layer_norm_backward);
  library.add("_fused_rms_norm", rms_norm);
  library.add("_fused_rms_norm_backward", rms_norm_backward);
  library.add("native_group_norm", group_norm);
  library.add("native_group_norm_backward", group_norm_backward);
  library.add("native_batch_norm", batch_norm);
  library.add("_native_batch_norm_legit", batch_norm_legit);
  library.add("_native_batch_norm_legit.no_stats", batch_norm_without_running);
  library.add("batch_norm_update_stats", batch_norm_update);
  library.add("native_batch_norm_backward", batch_norm_backward);
}

} // namespace tessera::internal::shapes
