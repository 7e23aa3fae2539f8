#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/bytes/folder_names.h>
#include <tessera/checkpoint/save/catalog.h>
#include <tessera/checkpoint/save/staging.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

namespace tessera::internal {

namespace {

constexpr int kAttempts = 20;

// Creates `folder` and the folders above it, and makes their entries durable.
void create_durably(const std::filesystem::path& folder) {
  auto existing = folder;
  while (!std::filesystem::exists(existing)) existing = existing.parent_path();
  std::filesystem::create_directories(folder);
  for (auto made = folder; made != existing; made = made.parent_path()) sync_folder(made.parent_path());
}

// An open folder with an exclusive lock; -1 when it is gone or another process holds the lock.
int lock_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat status {};
  const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::fstat(fd, &status) == 0;
  if (locked && status.st_nlink > 0) return fd;
  const int error = locked ? ENOENT : errno; // locked, but removed by then
  ::close(fd);
  errno = error;
  return -1;
}

// True for "<pid>-<number>", as names of `hidden_name` end.
bool is_process_and_number(std::string_view text) {
  const auto dash = text.find('-');
  const auto is_number = [](std::string_view part) {
    return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && is_number(text.substr(0, dash)) && is_number(text.substr(dash + 1));
}

// True for what a killed save to `target` left, and for a checkpoint that was half removed.
bool is_abandoned_name(std::string_view name, const std::filesystem::path& target) {
  const auto saving = "." + target.filename().string() + ".saving-";
  const std::string_view removing = ".removing-";
  if (name.starts_with(saving)) return is_process_and_number(name.substr(saving.size()));
  const auto end = name.rfind(removing);
  return name.starts_with('.') && end != std::string_view::npos && is_process_and_number(name.substr(end + removing.size()));
}

// Removes what killed saves left beside `target`: folders of other saves to it, and checkpoints half removed.
void remove_abandoned(const std::filesystem::path& target) {
  std::error_code ignored; // one that cannot be removed does no harm
  for (const auto& entry : std::filesystem::directory_iterator(target.parent_path(), ignored)) {
    if (!is_abandoned_name(entry.path().filename().string(), target) || !entry.is_directory(ignored)) continue;
    const int lock = lock_folder(entry.path());
    if (lock < 0) continue; // in use
    remove_tree(entry.path());
    ::close(lock);
  }
}

bool is_name(const std::filesystem::path& component) { return !component.empty() && component != "." && component != ".."; }

// Resolves a path as the system does: ".." after a symbolic link leads out of the folder that the link points at. The last
// component may be a link itself.
std::filesystem::path resolved(const std::filesystem::path& target) {
  auto path = std::filesystem::absolute(target);
  while (path.has_relative_path() && (!path.has_filename() || path.filename() == ".")) path = path.parent_path();
  if (!is_name(path.filename())) return std::filesystem::weakly_canonical(path);
  return std::filesystem::weakly_canonical(path.parent_path()) / path.filename();
}

// A bind mount of the same file system too, where the kernel tells.
bool is_mount_point(const std::filesystem::path& folder) {
  struct statx extended {};
  const bool tells = ::statx(AT_FDCWD, folder.c_str(), AT_SYMLINK_NOFOLLOW, 0, &extended) == 0 &&
                     (extended.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0;
  if (tells) return (extended.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
  struct stat own {};
  struct stat parent {};
  return ::lstat(folder.c_str(), &own) == 0 && ::stat(folder.parent_path().c_str(), &parent) == 0 && own.st_dev != parent.st_dev;
}

// A new folder takes the place of this one, which is removed. Called before anything is written.
void check_can_be_replaced(const std::filesystem::path& folder) {
  struct stat own {};
  struct stat current {};
  if (::lstat(folder.c_str(), &own) != 0 || !S_ISDIR(own.st_mode)) return; // of a link the link alone is replaced
  TORCH_CHECK(!is_mount_point(folder), folder.string(),
              " is a mount point, which cannot be replaced in one step: choose a folder in it");
  const bool is_current = ::stat(".", &current) == 0 && own.st_dev == current.st_dev && own.st_ino == current.st_ino;
  TORCH_CHECK(!is_current, folder.string(),
              " is the current folder, which would be a removed one afterwards: choose a folder in it, or work in another one");
}

void copy_permissions(const std::filesystem::path& from, const std::filesystem::path& to) {
  constexpr mode_t kPermissions = 07777;
  struct stat status {};
  if (::stat(from.c_str(), &status) != 0) return;
  [[maybe_unused]] const int ignored = ::chmod(to.c_str(), status.st_mode & kPermissions); // a file system may have none
}

} // namespace

Staging::Staging(const std::filesystem::path& target, bool overwrite, Staged staged)
    : target_(resolved(target)), overwrite_(overwrite), staged_(std::move(staged)) {
  TORCH_CHECK(staged_.kind != Staged::kFile || is_name(target.filename()), target.string(),
              " is the name of a folder, not of a file");
  check_target();
  create_durably(target_.parent_path());
  remove_abandoned(target_);
  make_folder();
}

void Staging::check_target() const {
  const auto name = target_.filename().string();
  TORCH_CHECK(name != kLatestName, target_.string(), ": the name \"", kLatestName,
              "\" is kept for the link to the newest checkpoint");
  TORCH_CHECK(!name.starts_with('.'), target_.string(),
              ": names that begin with '.' are kept for folders that are being written");
  if (!std::filesystem::exists(std::filesystem::symlink_status(target_))) return;
  if (staged_.kind != Staged::kFile) check_can_be_replaced(target_);
  const bool is_weights = staged_.kind == Staged::kWeights;
  if (is_weights && !holds_weights(target_, staged_.file_name)) return check_others_stay(target_, staged_.file_name);
  TORCH_CHECK(
      overwrite_, target_.string(),
      " exists already; a checkpoint is never changed (`overwrite` of the options, or --overwrite of the tool, replaces it)");
  if (staged_.kind == Staged::kFolder) return check_replaceable(target_);
  if (is_weights) return check_others_stay(target_, staged_.file_name);
  TORCH_CHECK(std::filesystem::is_regular_file(target_), target_.string(), " is not a file, so it is not replaced");
}

void Staging::make_folder() {
  // Another save may take the folder for an abandoned one in the moment before it is locked.
  for (int attempt = 0; attempt < kAttempts && lock_ < 0; ++attempt) {
    folder_ = hidden_name(target_, "saving");
    TORCH_CHECK(std::filesystem::create_directory(folder_), "cannot create ", folder_.string(), ": it exists");
    lock_ = lock_folder(folder_);
    const int error = errno;
    if (lock_ < 0) remove_tree(folder_);
    errno = error;
  }
  TORCH_CHECK(lock_ >= 0, "cannot lock ", folder_.string(), ": ", std::strerror(errno));
}

Staging::~Staging() {
  if (!committed_) remove_tree(folder_); // a folder that stays is removed by the next save
  if (lock_ >= 0) ::close(lock_);
}

void Staging::commit() {
  sync_folder(folder_);
  const bool is_file = staged_.kind == Staged::kFile, is_weights = staged_.kind == Staged::kWeights;
  const auto staged = is_file ? folder_ / target_.filename() : folder_;
  const bool exists = std::filesystem::exists(target_);
  if (!exists || (!overwrite_ && !is_weights)) {
    rename_new(staged, target_);
  } else if (is_file) {
    std::filesystem::rename(staged, target_);
  } else {
    if (is_weights) link_others(target_, staged, staged_.file_name);
    copy_permissions(target_, staged);
    replace_folder(staged, target_);
  }
  committed_ = !is_file;
  sync_folder(target_.parent_path());
}

} // namespace tessera::internal
