#include "test_device.h"

#include <c10/util/Exception.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/tests/support/simulated_device/simulated_device.h>
#include <tessera/tests/support/world.h>

#include <cstdlib>
#include <string_view>

namespace tessera::testing {

c10::DeviceType test_device_type() {
  const char* const variable = std::getenv("TESSERA_TEST_DEVICE");
  const std::string_view name = variable != nullptr ? variable : "";
  if (name.empty() || name == "cpu") return c10::kCPU;
  if (name == "sim") return sim::kDeviceType;
  TORCH_CHECK(name == "cuda", "TESSERA_TEST_DEVICE is ", name, ", but must be cpu, sim or cuda");
  return c10::kCUDA;
}

c10::Device test_device() {
  static const auto device = make_device_mesh(test_device_type(), {1}, {world_rank()}).device();
  return device;
}

} // namespace tessera::testing
