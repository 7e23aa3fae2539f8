#include <c10/util/Exception.h>
#include <tessera/base/error_text.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/folder_names.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/formats/distcp.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/formats/open.h>
#include <tessera/checkpoint/save/catalog.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace tessera::internal {

namespace {

constexpr int kScans = 100; // of a folder in which nothing whole is found, while others remove checkpoints

// "00001-of-00002", as names of several files end.
bool is_number_of_files(std::string_view text) {
  const std::string_view separator = "-of-", digits = "0123456789";
  const auto middle = text.find_first_not_of(digits);
  if (middle == 0 || middle == std::string_view::npos || !text.substr(middle).starts_with(separator)) return false;
  const auto count = text.substr(middle + separator.size());
  return !count.empty() && count.find_first_not_of(digits) == std::string_view::npos;
}

// The file of weights with this name, one of several, or their index.
bool is_of_weights(const std::filesystem::directory_entry& entry, const std::string& file_name) {
  const auto name = entry.path().filename().string();
  const auto begin = std::filesystem::path(file_name).stem().string() + "-";
  const std::string_view end = ".safetensors";
  const bool is_one_of_several =
      name.starts_with(begin) && name.ends_with(end) && name.size() > begin.size() + end.size() &&
      is_number_of_files(std::string_view(name).substr(begin.size(), name.size() - begin.size() - end.size()));
  return (name == file_name || name == file_name + ".index.json" || is_one_of_several) && !entry.is_directory();
}

// A load of the folder might read this one, and no weights beside it.
bool is_of_another_format(const std::filesystem::path& name) {
  return name == kIndexName || name == kDistcpMetadata || name.extension() == ".distcp";
}

bool is_part_of_checkpoint(const std::filesystem::directory_entry& entry) {
  const auto name = entry.path().filename();
  const bool known = name == kIndexName || name.string().ends_with(kIndexOfSafetensors) || name == kDistcpMetadata ||
                     name.extension() == ".safetensors" || name.extension() == ".distcp";
  return known && !entry.is_directory();
}

// Others call files index.json too. Ours begins with its own key; where that is damaged, our data files lie beside it.
bool has_own_index(const std::filesystem::path& folder) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(folder / kIndexName, ignored)) return false;
  return begins_as_index(File::open(folder / kIndexName)) || !safetensors_files_in(folder).empty();
}

// The time when the index was written, which says it itself only where it is whole.
using WriteTime = std::filesystem::file_time_type;

struct Damaged {
  WriteTime written;
  std::string error;
};

// The checkpoints in a folder, while other processes may save and remove some.
struct Listing {
  std::vector<std::filesystem::path> whole; // oldest first
  WriteTime newest_written = WriteTime::min();
  std::vector<Damaged> damaged;
  bool vanished = false; // one was removed in the meantime

  // One that was written last would be passed over without a word. Null when there is none.
  const Damaged* damaged_newest() const {
    const auto is_newest = [&](const Damaged& one) { return whole.empty() || one.written > newest_written; };
    const auto found = std::ranges::find_if(damaged, is_newest);
    return found == damaged.end() ? nullptr : &*found;
  }
};

using Dated = std::tuple<int64_t, std::filesystem::path, WriteTime>; // when it was saved, and its index written

// Adds a folder to `whole` where it holds a checkpoint, and to `listing` where it is damaged or gone.
void visit(const std::filesystem::path& folder, std::vector<Dated>& whole, Listing& listing) {
  std::error_code ignored, gone; // the time is taken before the index is read: it may be removed at any moment
  const auto written = std::filesystem::last_write_time(folder / kIndexName, gone);
  try {
    if (has_own_index(folder)) {
      whole.emplace_back(read_index(folder).saved_at, folder, written);
    } else if (!std::filesystem::exists(folder, ignored)) {
      listing.vanished = true;
    }
  } catch (const std::exception& error) { // also those of std::filesystem
    std::error_code unknown;
    if (std::filesystem::exists(folder / kIndexName, unknown) || unknown) {
      listing.damaged.push_back({written, error_text(error)});
    } else {
      listing.vanished = true;
    }
  }
}

Listing list(const std::filesystem::path& root) {
  Listing listing;
  std::vector<Dated> whole;
  std::error_code failure, ignored;
  const std::filesystem::directory_iterator entries(root, failure);
  const bool is_absent = failure == std::errc::no_such_file_or_directory || failure == std::errc::not_a_directory;
  TORCH_CHECK(!failure || is_absent, "checkpoint: cannot list ", root.string(), ": ", failure.message());
  for (const auto& entry : entries) {                                      // a folder that is not there holds none
    const bool hidden = entry.path().filename().string().starts_with('.'); // being written or removed
    if (!hidden && !entry.is_symlink(ignored)) visit(entry.path(), whole, listing);
  }
  std::sort(whole.begin(), whole.end());
  for (auto& [saved_at, path, written] : whole) {
    listing.whole.push_back(std::move(path));
    listing.newest_written = written;
  }
  return listing;
}

} // namespace

std::optional<Series> series_of(const std::filesystem::path& checkpoint) {
  constexpr const char* kDigits = "0123456789";
  const auto name = checkpoint.filename().string();
  const auto last = name.find_last_of(kDigits);
  if (last == std::string::npos) return std::nullopt;
  const auto begin = name.find_last_not_of(kDigits, last) + 1; // 0 where the number begins the name
  return Series(name.substr(0, begin), name.substr(last + 1));
}

void check_has_number(const std::filesystem::path& checkpoint) {
  TORCH_CHECK(series_of(checkpoint),
              "keep_last counts checkpoints whose names differ in a number, as step-100 and step-200, and ",
              checkpoint.filename(), " has none");
}

void check_replaceable(const std::filesystem::path& path) {
  TORCH_CHECK(std::filesystem::is_directory(path), path.string(), " is not a checkpoint, so it is not replaced");
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    TORCH_CHECK(is_part_of_checkpoint(entry), path.string(), " holds ", entry.path().filename().string(),
                ", which is no part of a checkpoint, so it is not replaced: move that away, or choose another name");
  }
}

bool holds_weights(const std::filesystem::path& path, const std::string& file_name) {
  const auto is_one = [&](const auto& entry) { return is_of_weights(entry, file_name); };
  return std::filesystem::is_directory(path) && std::ranges::any_of(std::filesystem::directory_iterator(path), is_one);
}

void check_others_stay(const std::filesystem::path& path, const std::string& file_name) {
  TORCH_CHECK(std::filesystem::is_directory(path), path.string(), " exists already and is no folder, so it is not replaced");
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const auto name = entry.path().filename();
    TORCH_CHECK(!is_of_another_format(name), path.string(), " holds ", name.string(),
                ", a part of a checkpoint in another format: choose another folder, or remove that checkpoint");
    TORCH_CHECK(is_of_weights(entry, file_name) || entry.is_symlink() || entry.is_regular_file(), path.string(), " holds ",
                name.string(), ", which is neither a part of a checkpoint nor a file, so it is not replaced: ",
                "move that away, or choose another name");
  }
}

void link_others(const std::filesystem::path& from, const std::filesystem::path& to, const std::string& file_name) {
  for (const auto& entry : std::filesystem::directory_iterator(from)) {
    if (is_of_weights(entry, file_name)) continue;
    const auto copy = to / entry.path().filename();
    std::error_code failure; // of a file system without hard links
    if (!entry.is_symlink()) std::filesystem::create_hard_link(entry.path(), copy, failure);
    if (entry.is_symlink() || failure) std::filesystem::copy(entry.path(), copy, std::filesystem::copy_options::copy_symlinks);
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
  auto paths = list(root).whole;
  std::erase_if(paths, [&](const auto& path) { return path == newest || series_of(path) != series_of(newest); });
  for (size_t i = 0; i + static_cast<size_t>(count) <= paths.size(); ++i) {
    const auto hidden = hidden_name(paths[i], "removing");
    try {
      rename_new(paths[i], hidden);
    } catch (const c10::Error&) {
      if (std::filesystem::exists(paths[i])) throw;
      continue; // a save beside this one has removed it
    }
    sync_folder(root);
    const int error = remove_tree(hidden);
    TORCH_CHECK(error == 0, "cannot remove ", hidden.string(), ": ", std::strerror(error));
  }
}

} // namespace tessera::internal

namespace tessera::checkpoint {

std::filesystem::path latest(const std::filesystem::path& root) {
  internal::Listing found;
  for (int scan = 0; scan < internal::kScans; ++scan) {
    found = internal::list(root);
    if (!found.whole.empty() && !found.damaged_newest()) break;
    // The listing of a folder that changes may miss what was there all the time.
    if (!found.vanished && scan > 0) break;
  }
  if (const auto* damaged = found.damaged_newest()) {
    TORCH_CHECK(false, damaged->error, "\nNo whole checkpoint beside it is newer; remove it, or name the one to load");
  }
  return found.whole.empty() ? std::filesystem::path() : found.whole.back();
}

} // namespace tessera::checkpoint
