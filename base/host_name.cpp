#include <tessera/base/host_name.h>

#include <unistd.h>
#include <array>
#include <fstream>

namespace tessera::internal {

std::string host_name() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

} // namespace tessera::internal
