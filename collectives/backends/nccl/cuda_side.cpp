// libtessera_nccl.so: the part of Tessera that needs CUDA's headers and libraries.
#include <tessera/collectives/backends/nccl/nccl_communicator.h>
#include <tessera/collectives/backends/nccl/plugin.h>

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <absl/strings/escaping.h>
#include <absl/strings/string_view.h>
#include <string>

namespace tessera::internal::nccl {

namespace {

class RealCudaSide final : public CudaSide {
 public:
  int device_count() override {
    try {
      return c10::cuda::device_count_ensure_non_zero();
    } catch (const c10::Error& error) { // no driver, one that is too old, or none that is visible
      TORCH_CHECK(false, "no CUDA device: ", error.what_without_backtrace());
    }
  }

  void set_device(int device) override { c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device)); }

  std::string device_identity(int device) override {
    const auto* const properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
    const absl::string_view uuid(properties->uuid.bytes, sizeof(properties->uuid.bytes));
    return std::string(properties->name) + " " + absl::BytesToHexString(uuid);
  }

  CommunicatorPtr make_communicator(const GroupDescription& group, int device, CudaBuffers buffers) override {
    return make_nccl_communicator(group, device, buffers);
  }
};

} // namespace

} // namespace tessera::internal::nccl

extern "C" tessera::internal::nccl::CudaSide* tessera_cuda_side_of_interface(
    const tessera::internal::nccl::Interface& interface) {
  static tessera::internal::nccl::RealCudaSide side;
  return interface == tessera::internal::nccl::Interface() ? &side : nullptr;
}
