#include <tessera/offload/host_memory.h>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace tessera::internal {

namespace {

class HostMemory final : public OffloadMemory {
 public:
  explicit HostMemory(bool pinned) : pinned_(pinned) {
    TORCH_CHECK(!pinned || at::globalContext().hasCUDA(),
                "offload: page-locked memory needs a CUDA device and LibTorch's CUDA libraries, which this process has not; "
                "offload_to_host(/*pin_memory=*/false) goes without");
  }
  void reserve(int64_t bytes) override {}
  c10::DataPtr allocate(int64_t bytes) override {
    auto* const allocator = pinned_ ? at::globalContext().getPinnedMemoryAllocator(at::kCUDA) : c10::GetCPUAllocator();
    auto memory = allocator->allocate(static_cast<size_t>(bytes));
    std::memset(memory.get(), 0, static_cast<size_t>(bytes));
    return memory;
  }
  std::unique_ptr<Fetch> fetch(const at::Tensor& source, const at::Tensor& destination) override {
    const at::NoGradGuard no_grad;
    destination.copy_(source, /*non_blocking=*/pinned_);
    return std::make_unique<FinishedFetch>(); // it comes before what else the device is given to do
  }
  void store(const at::Tensor& source, const at::Tensor& destination) override {
    const at::NoGradGuard no_grad;
    destination.copy_(source);
  }

 private:
  bool pinned_;
};

} // namespace

std::shared_ptr<OffloadMemory> make_host_memory(bool pinned) { return std::make_shared<HostMemory>(pinned); }

} // namespace tessera::internal
