#include <tessera/training/loop/step/memory_numbers.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <fstream>

namespace tessera::internal {

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t device_bytes(c10::Device device) {
  if (!device.is_cuda()) return 0;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return 0;
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return allocator->getDeviceStats(device.index()).allocated_bytes[all].current;
}

} // namespace tessera::internal
