#include <c10/util/Exception.h>
#include <tessera/checkpoint/catalog.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/distcp.h>
#include <tessera/checkpoint/file.h>
#include <tessera/checkpoint/index.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/staging.h>

#include <algorithm>
#include <string>
#include <utility>

namespace tessera::checkpoint {

namespace {

bool is_part_of_checkpoint(const std::filesystem::directory_entry& entry) {
  const auto name = entry.path().filename();
  const bool known = name == kIndexName || name == kHuggingFaceIndex || name == kDistcpMetadata ||
                     name.extension() == ".safetensors" || name.extension() == ".distcp";
  return known && !entry.is_directory();
}

// Others call files index.json too. Ours begins with its own key; where that is damaged, our data files lie beside it.
bool has_own_index(const std::filesystem::path& folder) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(folder / kIndexName, ignored)) return false;
  const auto file = File::open(folder / kIndexName);
  std::string start(std::min(std::string_view(kIndexStart).size(), static_cast<size_t>(file.size())), '\0');
  file.read_at(start.data(), start.size(), 0);
  return start == kIndexStart || !safetensors_files_in(folder).empty();
}

enum class Damaged { kError, kSkipped };

// The complete checkpoints in `root`, oldest first.
std::vector<std::filesystem::path> list(const std::filesystem::path& root, Damaged damaged) {
  std::vector<std::pair<int64_t, std::filesystem::path>> found;
  if (!std::filesystem::is_directory(root)) return {};
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    const bool hidden = entry.path().filename().string().starts_with('.'); // being written or removed
    if (hidden || entry.is_symlink()) continue;
    try {
      if (has_own_index(entry.path())) found.emplace_back(read_index(entry.path()).saved_at, entry.path());
    } catch (const c10::Error&) {
      if (damaged == Damaged::kError) throw;
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<std::filesystem::path> paths;
  for (auto& [saved_at, path] : found) paths.push_back(std::move(path));
  return paths;
}

} // namespace

std::filesystem::path latest(const std::filesystem::path& root) {
  const auto paths = list(root, Damaged::kError);
  return paths.empty() ? std::filesystem::path() : paths.back();
}

void check_replaceable(const std::filesystem::path& path) {
  TORCH_CHECK(std::filesystem::is_directory(path), path.string(), " is not a checkpoint, so it is not replaced");
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    TORCH_CHECK(is_part_of_checkpoint(entry), path.string(), " holds ", entry.path().filename().string(),
                ", which is no part of a checkpoint, so it is not replaced");
  }
}

void check_latest_is_link(const std::filesystem::path& root) {
  const auto link = root / kLatestName;
  const auto status = std::filesystem::symlink_status(link);
  TORCH_CHECK(!std::filesystem::exists(status) || std::filesystem::is_symlink(status), link.string(),
              " is no symbolic link, so it is not replaced; SaveOptions::update_latest = false does without it");
}

void point_latest_to(const std::filesystem::path& checkpoint) {
  replace_link(checkpoint.parent_path() / kLatestName, checkpoint.filename());
}

int64_t time_of_latest(const std::filesystem::path& root) {
  try {
    return read_index(root / kLatestName).saved_at;
  } catch (const std::exception&) {
    return 0;
  }
}

void keep_last(const std::filesystem::path& root, int count, const std::filesystem::path& newest) {
  auto paths = list(root, Damaged::kSkipped);
  std::erase(paths, newest);
  for (size_t i = 0; i + static_cast<size_t>(count) <= paths.size(); ++i) {
    const auto hidden = hidden_name(paths[i], "removing");
    try {
      rename_new(paths[i], hidden);
    } catch (const c10::Error&) {
      if (std::filesystem::exists(paths[i])) throw;
      continue; // a save beside this one has removed it
    }
    sync_folder(root);
    std::filesystem::remove_all(hidden);
  }
}

} // namespace tessera::checkpoint
