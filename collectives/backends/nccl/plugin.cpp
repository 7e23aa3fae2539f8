#include <tessera/collectives/backends/nccl/plugin.h>

#include <tessera/collectives/backends/nccl/device_agreement.h>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>

#include <absl/strings/numbers.h>
#include <dlfcn.h>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera::internal::nccl {

namespace {

struct Plugin {
  CudaSide* side = nullptr;
  std::string error = {}; ///< why it is not there
};

std::filesystem::path folder_of_the_library_with(const void* symbol) {
  Dl_info info;
  if (dladdr(symbol, &info) == 0 || !info.dli_fname) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

std::string environment_value(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

// LibTorch asks for CUDA once, as early as at the first seed, and remembers the answer. Hence its CUDA libraries are loaded with
// this one where there is a driver: whatever a program does first, CUDA is not lost. TESSERA_LOAD_CUDA=0 or 1 decides in place of
// the driver. Another value is an error when CUDA is asked for: nothing can be thrown here.
[[gnu::constructor]] void load_cuda_where_there_is_a_driver() {
  const auto decided = environment_value("TESSERA_LOAD_CUDA");
  if (decided == "0" || (decided != "1" && !dlopen("libcuda.so.1", RTLD_LAZY))) return;
  const auto folder = folder_of_the_library_with(reinterpret_cast<const void*>(&at::detail::getCUDAHooks));
  dlopen((folder / "libtorch_cuda.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
}

/// The value of an environment variable that has two; empty where it is not set.
std::string one_of_two(const char* name, std::string_view one, std::string_view other) {
  auto value = environment_value(name);
  TORCH_CHECK(value.empty() || value == one || value == other, "environment variable ", name, "=", value, " must be ", one,
              " or ", other);
  return value;
}

CudaBuffers chosen_buffers() {
  return one_of_two("TESSERA_CUDA_BUFFERS", "caching", "registered") == "registered" ? CudaBuffers::kRegistered
                                                                                     : CudaBuffers::kCaching;
}

Plugin load() {
  const auto path = folder_of_the_library_with(reinterpret_cast<const void*>(&require_cuda_side)) / "libtessera_nccl.so";
  if (!std::filesystem::exists(path))
    return {.error = "this build of Tessera has no CUDA side (no " + path.string() +
                     "): build it with -DTESSERA_CUDA=ON, or it was not built: --target tessera_nccl"};
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  auto* const get = handle ? reinterpret_cast<GetCudaSide*>(dlsym(handle, kGetCudaSideName)) : nullptr;
  auto* const side = get ? get(Interface()) : nullptr;
  if (side) return {.side = side};
  const char* const reason = get ? "it has another interface" : dlerror();
  return {.error = "cannot load " + path.string() + ": " + (reason ? reason : "unknown reason") +
                   (handle ? "; it is of another build of Tessera: build it anew (--target tessera_nccl)" : "")};
}

} // namespace

bool stages_collectives() { return one_of_two("TESSERA_CUDA_COLLECTIVES", "nccl", "staged") == "staged"; }

void check_settings() {
  one_of_two("TESSERA_LOAD_CUDA", "0", "1");
  stages_collectives();
  chosen_buffers();
  const auto device = environment_value("TESSERA_CUDA_DEVICE");
  int index = 0;
  TORCH_CHECK(device.empty() || (absl::SimpleAtoi(device, &index) && index >= 0),
              "environment variable TESSERA_CUDA_DEVICE=", device, " must be a device's index, from 0 on");
}

CudaSide& require_cuda_side() {
  check_settings();
  static const Plugin plugin = load();
  TORCH_CHECK(plugin.side, plugin.error);
  static_cast<void>(plugin.side->device_count()); // a missing device says more than what follows
  TORCH_CHECK(at::Context::hasCUDART(),
              "LibTorch looked for CUDA before its CUDA libraries were loaded, and does not look again: call "
              "tessera::cuda_is_available() before any other use of LibTorch, set TESSERA_LOAD_CUDA=1, or link torch_cuda");
  return *plugin.side;
}

int device_index(const std::string& chosen, int64_t local_rank, int device_count) {
  if (chosen.empty()) {
    if (device_count == 1) return 0; // each process sees its own
    TORCH_CHECK(local_rank < device_count, "this process is the process ", local_rank, " on its host and needs CUDA device ",
                local_rank, ", but there are ", device_count, " (TESSERA_CUDA_DEVICE chooses another)");
    return static_cast<int>(local_rank);
  }
  int device = -1;
  TORCH_CHECK(absl::SimpleAtoi(chosen, &device) && device >= 0 && device < device_count,
              "environment variable TESSERA_CUDA_DEVICE=", chosen, " must be a device's index in [0, ", device_count, ")");
  return device;
}

at::Device choose_device(int64_t local_rank) {
  auto& side = require_cuda_side();
  const int index = device_index(environment_value("TESSERA_CUDA_DEVICE"), local_rank, side.device_count());
  side.set_device(index);
  return {at::kCUDA, static_cast<at::DeviceIndex>(index)};
}

CommunicatorPtr make_communicator(const GroupDescription& group) {
  c10::DeviceIndex device = -1;
  auto buffers = CudaBuffers::kCaching;
  DeviceAnswer own;
  try {
    buffers = chosen_buffers();
    device = choose_device(group.local_rank).index();
    own.identity = require_cuda_side().device_identity(device);
  } catch (const c10::Error& error) {
    own.error = error.what_without_backtrace();
  }
  // NCCL lets ranks share a device only where they pretend to be on different hosts.
  agree_on_devices(group, own, environment_value("NCCL_HOSTID").empty() ? SharedDevices::kRefused : SharedDevices::kAllowed);
  return require_cuda_side().make_communicator(group, device, buffers);
}

} // namespace tessera::internal::nccl
