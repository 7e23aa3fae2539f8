// Activations and dropout: element by element.

#include <tessera/plan/shapes/meta_library.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout.h>

#include <span>

namespace tessera::internal::shapes {

namespace {

Tensor of_one(const Tensor& self) { return elementwise({self}); }
Tensor of_two(const Tensor& gradient, const Tensor& self) { return elementwise({gradient, self}); }
Tensor hardtanh(const Tensor& self, const at::Scalar&, const at::Scalar&) { return elementwise({self}); }
Tensor hardtanh_backward(const Tensor& gradient, const Tensor& self, const at::Scalar&, const at::Scalar&) {
  return elementwise({gradient, self});
}

Tensor glu_backward(const Tensor&, const Tensor& self, int64_t) { return empty_of(self, self.sizes()); }

/// The CPU's keeps what its backward takes.
Two log_sigmoid(const Tensor& self) {
  const auto x = self.contiguous();
  const bool keeps = device_behind_meta() == c10::DeviceType::CPU;
  return {empty_of(x, x.sizes()), keeps ? empty_of(x, x.sizes()) : empty_of(x, {0})};
}
Tensor log_sigmoid_backward(const Tensor& gradient, const Tensor&, const Tensor&) { return empty_of(gradient, gradient.sizes()); }

Two prelu_backward(const Tensor& gradient, const Tensor& self, const Tensor& weight) {
  return {elementwise({gradient, self, weight}), elementwise({gradient, self, weight})};
}

Two dropout(const Tensor& self, double, std::optional<bool> training) {
  return {at::empty_like(self), at::empty_like(self, self.options().dtype(at::kBool))};
}
Tensor dropout_backward(const Tensor& gradient, const Tensor&, double) { return at::empty_like(gradient); }

/// CUDA keeps a mask of bools, and the CPU what it multiplied by.
void choose_dropout(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto arguments = std::span(*stack).last(3);
  const auto p = arguments[1].toDouble();
  const bool drops = arguments[0].toTensor().is_meta() && arguments[2].toBool() && p > 0 && p < 1;
  if (!drops || device_behind_meta() != c10::DeviceType::CUDA)
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  auto out = std::get<0>(at::native_dropout(arguments[0].toTensor(), p, /*train=*/true));
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, std::move(out));
}

} // namespace

void add_choice_of_dropout(MetaLibrary& autograd) {
  autograd.add("dropout", torch::CppFunction::makeFromBoxedFunction<&choose_dropout>());
}

void add_activations(MetaLibrary& library) {
  for (const auto* name : {"relu", "hardswish"}) library.add(name, of_one);
  for (const auto* name : {"hardswish_backward", "_prelu_kernel"}) library.add(name, of_two);
  library.add("hardtanh", hardtanh);
  library.add("hardtanh_backward", hardtanh_backward);
  library.add("glu_backward", glu_backward);
  library.add("log_sigmoid_forward", log_sigmoid);
  library.add("log_sigmoid_backward", log_sigmoid_backward);
  library.add("_prelu_kernel_backward", prelu_backward);
  library.add("native_dropout", dropout);
  library.add("native_dropout_backward", dropout_backward);
}

} // namespace tessera::internal::shapes
