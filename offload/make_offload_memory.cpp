#include <tessera/offload/make_offload_memory.h>

#include <c10/util/Exception.h>

#include <utility>

#include <tessera/offload/device_file_memory.h>
#include <tessera/offload/file_memory.h>
#include <tessera/offload/host_memory.h>

namespace tessera::internal {

std::shared_ptr<OffloadMemory> make_offload_memory(const OffloadPolicy& policy, c10::Device device) {
  switch (policy.memory) {
    case OffloadPolicy::Memory::kDevice: return nullptr;
    case OffloadPolicy::Memory::kHost: return device.is_cpu() ? nullptr : make_host_memory(policy.pin_memory);
    case OffloadPolicy::Memory::kFiles: {
      auto file = FileMemory::create(policy.folder);
      if (device.is_cpu()) return file;
      return make_device_file_memory(std::move(file), policy.pin_memory);
    }
  }
  TORCH_CHECK_VALUE(false, "offload: an unknown kind of memory, ", static_cast<int>(policy.memory));
}

} // namespace tessera::internal
