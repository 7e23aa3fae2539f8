#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/index.h>

#include <utility>

namespace tessera::checkpoint {

std::filesystem::path latest(const std::filesystem::path& root) {
  std::pair<int64_t, std::filesystem::path> newest{-1, {}};
  if (!std::filesystem::is_directory(root)) return {};
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    const bool hidden = entry.path().filename().string().starts_with('.'); // a save that is not committed
    if (hidden || !std::filesystem::exists(entry.path() / kIndexName)) continue;
    newest = std::max(newest, {read_index(entry.path()).saved_at, entry.path()});
  }
  return newest.second;
}

} // namespace tessera::checkpoint
