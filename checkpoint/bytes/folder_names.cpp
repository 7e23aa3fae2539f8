#include <tessera/checkpoint/bytes/folder_names.h>
#include <unistd.h>

#include <atomic>

namespace tessera::internal {

std::filesystem::path hidden_name(const std::filesystem::path& path, const std::string& purpose) {
  static std::atomic<int> names{0};
  const auto name =
      "." + path.filename().string() + "." + purpose + "-" + std::to_string(::getpid()) + "-" + std::to_string(names++);
  return path.parent_path() / name;
}

} // namespace tessera::internal
