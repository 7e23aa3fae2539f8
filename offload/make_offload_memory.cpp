#include <tessera/offload/make_offload_memory.h>

#include <c10/util/Exception.h>

#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/offload/device_file_memory.h>
#include <tessera/offload/file_memory.h>
#include <tessera/offload/host_memory.h>

namespace tessera::internal {

namespace {

SimulatedClock* clock_of_this_rank() { return is_initialized() ? process_context().simulated_clock() : nullptr; }

/// The memory of a mesh on the meta device has no values. Its copies take the time that the clock of a simulated rank has for
/// them.
class SimulatedMemory final : public OffloadMemory {
 public:
  void reserve(int64_t /*bytes*/) override {}
  c10::DataPtr allocate(int64_t bytes) override { return c10::GetAllocator(c10::kMeta)->allocate(static_cast<size_t>(bytes)); }
  std::unique_ptr<PendingCopy> fetch(const at::Tensor& source, const at::Tensor& /*destination*/) override {
    take_time(static_cast<int64_t>(source.nbytes()));
    return std::make_unique<FinishedCopy>();
  }
  std::unique_ptr<PendingCopy> store(const std::vector<at::Tensor>& sources,
                                     const std::vector<at::Tensor>& /*destinations*/) override {
    int64_t bytes = 0;
    for (const auto& source : sources) bytes += static_cast<int64_t>(source.nbytes());
    take_time(bytes);
    return nullptr;
  }

 private:
  static void take_time(int64_t bytes) {
    auto* const clock = clock_of_this_rank();
    if (!clock || !clock->options().host_bytes_per_second) return;
    clock->add_compute(static_cast<double>(bytes) / *clock->options().host_bytes_per_second);
  }
};

} // namespace

std::shared_ptr<OffloadMemory> make_offload_memory(const OffloadPolicy& policy, c10::Device device) {
  if (device.is_meta() && policy.memory != OffloadPolicy::Memory::kDevice) return std::make_shared<SimulatedMemory>();
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
