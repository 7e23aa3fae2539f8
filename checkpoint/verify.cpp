#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/reader.h>

namespace tessera::checkpoint {

std::vector<std::string> verify(const std::filesystem::path& dir) {
  try {
    const auto index = read_index(dir);
    return Reader(dir, index, true).verify_all();
  } catch (const c10::Error& error) {
    return {error.what_without_backtrace()};
  }
}

} // namespace tessera::checkpoint
