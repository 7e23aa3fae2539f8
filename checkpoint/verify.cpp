#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/reader.h>
#include <tessera/collectives/error_text.h>

namespace tessera::checkpoint {

std::vector<std::string> verify(const std::filesystem::path& dir) {
  try {
    const auto [folder, index] = open_checkpoint(dir);
    return Reader(folder, index, index.has_checksums).verify_all();
  } catch (const std::exception& error) { // also those of std::filesystem
    return {error_text(error)};
  }
}

} // namespace tessera::checkpoint
