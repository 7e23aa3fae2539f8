#include <tessera/tests/support/simulated_device/hooks.h>

#include <tessera/tests/support/simulated_device/caching_allocator.h>
#include <tessera/tests/support/simulated_device/generator.h>
#include <tessera/tests/support/simulated_device/host_accesses.h>

#include <ATen/EmptyTensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace tessera::testing::sim {

at::Device Hooks::getDeviceFromPtr(void*) const { return {kDeviceType, 0}; }
const at::Generator& Hooks::getDefaultGenerator(c10::DeviceIndex) const { return default_generator(); }
at::Generator Hooks::getNewGenerator(c10::DeviceIndex) const { return make_generator(); }
bool Hooks::isPinnedPtr(const void* data) const { return PinnedAllocator::get().holds(data); }

c10::Allocator* Hooks::getPinnedMemoryAllocator() const {
  watch_host_accesses();
  return &PinnedAllocator::get();
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  auto& allocator = CachingAllocator::get();
  auto memory = allocator.allocate(bytes);
  if (const auto kept = std::min(bytes, storage.nbytes()); kept > 0) allocator.copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (c10::multiply_integers(sizes) > 0 && bytes > tensor.storage().nbytes())
    Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  return tensor;
}

} // namespace tessera::testing::sim
