// Tensor::set_data asks this operator first, on a tensor and the data that it shall get.

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <tessera/dtensor/dtensor_impl.h>

namespace tessera::internal::dispatch {

namespace {

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  TORCH_CHECK((dtensor_meta(self) == nullptr) == (dtensor_meta(from) == nullptr), "set_data: ",
              dtensor_meta(self) ? "the tensor is a DTensor and its new data is plain"
                                 : "the tensor is plain and its new data is a DTensor",
              ". Module::clone of a sharded module does this: call clone() before fully_shard, and shard the clone");
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

} // namespace

// In front of the composite kernel, which would run without a look at the DTensor.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type); }

} // namespace tessera::internal::dispatch
