#include <tessera/collectives/nccl/plugin.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <filesystem>
#include <string>

namespace tessera::internal::nccl {

namespace {

struct Plugin {
  MakeCommunicator* make_communicator = nullptr;
  DeviceCount* device_count = nullptr;
  std::string error; ///< why it is not there
};

std::filesystem::path beside_this_library(const char* name) {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&require_cuda), &info) == 0 || !info.dli_fname) return name;
  return std::filesystem::path(info.dli_fname).parent_path() / name;
}

Plugin load() {
  Plugin plugin;
  const auto path = beside_this_library("libtessera_nccl.so");
  if (!std::filesystem::exists(path)) {
    plugin.error =
        "this build of Tessera has no CUDA side (no " + path.string() + "): build it where a CUDA toolkit is installed";
    return plugin;
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle) {
    plugin.make_communicator = reinterpret_cast<MakeCommunicator*>(dlsym(handle, kMakeCommunicatorName));
    plugin.device_count = reinterpret_cast<DeviceCount*>(dlsym(handle, kDeviceCountName));
  }
  if (!plugin.make_communicator || !plugin.device_count) {
    const char* reason = dlerror();
    plugin.error = "cannot load " + path.string() + ": " + (reason ? reason : "unknown reason");
  }
  return plugin;
}

const Plugin& plugin() {
  static const Plugin loaded = load();
  return loaded;
}

} // namespace

CommunicatorPtr make_communicator(const GroupDescription& group) {
  TORCH_CHECK(plugin().error.empty(), plugin().error);
  CommunicatorPtr made;
  plugin().make_communicator(group, made);
  return made;
}

void require_cuda() {
  TORCH_CHECK(plugin().error.empty(), plugin().error);
  TORCH_CHECK(plugin().device_count() > 0, "no CUDA device is available to this process");
  TORCH_CHECK(at::hasCUDA(),
              "LibTorch looked for CUDA before its CUDA libraries were loaded, and does not look again: call "
              "tessera::cuda_is_available() before any other use of LibTorch, or link torch_cuda");
}

} // namespace tessera::internal::nccl
