#include <tessera/offload/host_memory.h>

#include <tessera/base/current_stream.h>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace tessera::internal {

c10::Allocator* pinned_allocator() {
  const auto accelerator = at::getAccelerator();
  TORCH_CHECK(accelerator,
              "offload: page-locked memory needs a CUDA device and LibTorch's CUDA libraries, which this process has "
              "not; OffloadPolicy::pin_memory = false goes without");
  return at::globalContext().getPinnedMemoryAllocator(accelerator);
}

namespace {

/// What the device's current stream holds.
class CopyOfDevice final : public PendingCopy {
 public:
  explicit CopyOfDevice(c10::Device device) : end_(device.type()) { end_.record(current_stream(device)); }
  void wait() override {
    if (!end_.query()) end_.synchronize();
  }

 private:
  c10::Event end_;
};

class HostMemory final : public OffloadMemory {
 public:
  explicit HostMemory(bool pinned) : pinned_(pinned), allocator_(pinned ? pinned_allocator() : c10::GetCPUAllocator()) {}
  void reserve(int64_t bytes) override {}
  c10::DataPtr allocate(int64_t bytes) override {
    auto memory = allocator_->allocate(static_cast<size_t>(bytes));
    std::memset(memory.get(), 0, static_cast<size_t>(bytes));
    return memory;
  }
  std::unique_ptr<PendingCopy> fetch(const at::Tensor& source, const at::Tensor& destination) override {
    const at::NoGradGuard no_grad;
    destination.copy_(source, /*non_blocking=*/pinned_);
    return std::make_unique<FinishedCopy>(); // it comes before what else the device is given to do
  }
  std::unique_ptr<PendingCopy> store(const std::vector<at::Tensor>& sources,
                                     const std::vector<at::Tensor>& destinations) override {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < sources.size(); ++i) destinations[i].copy_(sources[i], /*non_blocking=*/pinned_);
    const auto device = sources.at(0).device();
    return pinned_ && !device.is_cpu() ? std::make_unique<CopyOfDevice>(device) : nullptr;
  }

 private:
  bool pinned_;
  c10::Allocator* allocator_;
};

} // namespace

std::shared_ptr<OffloadMemory> make_host_memory(bool pinned) { return std::make_shared<HostMemory>(pinned); }

} // namespace tessera::internal
