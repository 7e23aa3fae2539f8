#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/staging.h>

#include <algorithm>
#include <utility>

namespace tessera::checkpoint {

std::vector<std::filesystem::path> list(const std::filesystem::path& root) {
  std::vector<std::pair<int64_t, std::filesystem::path>> found;
  if (!std::filesystem::is_directory(root)) return {};
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    const bool hidden = entry.path().filename().string().starts_with('.'); // being written or removed
    if (hidden || entry.is_symlink() || !std::filesystem::exists(entry.path() / kIndexName)) continue;
    found.emplace_back(read_index(entry.path()).saved_at, entry.path());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::filesystem::path> paths;
  for (auto& [saved_at, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::filesystem::path latest(const std::filesystem::path& root) {
  const auto paths = list(root);
  return paths.empty() ? std::filesystem::path() : paths.back();
}

void point_latest_to(const std::filesystem::path& checkpoint) {
  replace_link(checkpoint.parent_path() / kLatestName, checkpoint.filename());
}

void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest) {
  auto paths = list(root);
  std::erase(paths, newest);
  for (size_t i = 0; i + static_cast<size_t>(count) <= paths.size(); ++i) {
    const auto hidden = hidden_name(paths[i], "removing");
    rename_new(paths[i], hidden);
    sync_folder(root);
    std::filesystem::remove_all(hidden);
  }
}

} // namespace tessera::checkpoint
