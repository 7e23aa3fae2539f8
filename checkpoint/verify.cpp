#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/reader.h>

namespace tessera::checkpoint {

std::vector<std::string> verify(const std::filesystem::path& dir) {
  try {
    const auto [folder, index] = open_checkpoint(dir);
    return Reader(folder, index, index.has_checksums).verify_all();
  } catch (const c10::Error& error) {
    return {error.what_without_backtrace()};
  }
}

} // namespace tessera::checkpoint
