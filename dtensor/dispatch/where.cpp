// A number in `where(condition, a, 1.0)`. PyTorch makes a tensor of no dims of it, which looks like any other plain one; here it
// stays marked as a number, as those of `a + 1.0` are.

#include <ATen/core/Tensor.h>
#include <ATen/ops/result_type_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

namespace tessera::internal::dispatch {

namespace {

at::Tensor number(const at::Scalar& value, const at::Tensor& condition, at::ScalarType dtype) {
  auto tensor = at::scalar_tensor(value, condition.options().dtype(dtype));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Tensor where_self(const at::Tensor& condition, const at::Scalar& self, const at::Tensor& other) {
  return at::where(condition, number(self, condition, at::native::result_type(other, self)), other);
}

at::Tensor where_other(const at::Tensor& condition, const at::Tensor& self, const at::Scalar& other) {
  return at::where(condition, self, number(other, condition, at::native::result_type(self, other)));
}

at::Tensor where_both(const at::Tensor& condition, const at::Scalar& self, const at::Scalar& other) {
  const auto dtype = at::native::result_type(self, other);
  return at::where(condition, number(self, condition, dtype), number(other, condition, dtype));
}

void add_kernels(torch::Library& library) {
  library.impl("where.ScalarSelf", &where_self);
  library.impl("where.ScalarOther", &where_other);
  library.impl("where.Scalar", &where_both);
}

} // namespace

} // namespace tessera::internal::dispatch

// In front of the composite kernels; under InferenceMode a tensor may have no key of autograd.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) { tessera::internal::dispatch::add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { tessera::internal::dispatch::add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { tessera::internal::dispatch::add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, AutogradMeta, library) { tessera::internal::dispatch::add_kernels(library); }
TORCH_LIBRARY_IMPL(aten, Fake, library) { tessera::internal::dispatch::add_kernels(library); }
