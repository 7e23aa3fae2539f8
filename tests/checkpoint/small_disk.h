#pragma once

#include <sys/mount.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

#include "../support/temporary_folder.h"
#include "../support/world.h"
#include "shared_folder.h"

namespace tessera::testing {

/// Files that this process writes may not grow beyond `bytes` while this lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

/// A small file system of its own, where this process may mount one.
class SmallDisk {
 public:
  SmallDisk(const std::filesystem::path& folder, const std::string& options, unsigned long flags) : folder_(folder) {
    std::filesystem::create_directories(folder);
    mounted_ = ::mount("tmpfs", folder.c_str(), "tmpfs", flags, options.c_str()) == 0;
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }

 private:
  std::filesystem::path folder_;
  bool mounted_ = false;
};

/// Rank 0 makes the disk; every rank learns whether it could.
inline bool make_disk(std::optional<SmallDisk>& disk, const std::filesystem::path& folder, const std::string& options,
                      unsigned long flags) {
  if (world_rank() == 0) {
    disk.emplace(folder, options, flags);
    if (disk->mounted()) write_text(folder.string() + ".mounted", "");
  }
  SharedFolder::barrier();
  return std::filesystem::exists(folder.string() + ".mounted");
}

} // namespace tessera::testing
