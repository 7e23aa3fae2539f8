// Tensor::set_data asks this operator first, on a tensor and the data that it shall get.

#include <ATen/ops/_has_compatible_shallow_copy_type_ops.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

bool has_compatible_shallow_copy_type(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& from) {
  const bool are_dtensors = dtensor_meta(self) != nullptr;
  TORCH_CHECK(
      are_dtensors == (dtensor_meta(from) != nullptr), "set_data: ",
      are_dtensors ? "the tensor is a DTensor and its new data is plain" : "the tensor is plain and its new data is a DTensor",
      ". Module::clone of a sharded module does this: call clone() before fully_shard, and shard the clone");
  if (are_dtensors) return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
  return at::_ops::_has_compatible_shallow_copy_type::redispatch(keys & c10::after_autograd_keyset, self, from);
}

} // namespace

// In front of the composite kernel, which would run without a look at the DTensor.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

} // namespace tessera::internal::dispatch
