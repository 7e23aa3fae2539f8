#include "memory_groups.h"

#include <c10/util/Exception.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>

namespace tessera::benchmarks {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVersion1 = "/sys/fs/cgroup/memory";
constexpr const char* kVersion2 = "/sys/fs/cgroup";

bool is_version_2() {
  std::ifstream controllers(fs::path(kVersion2) / "cgroup.controllers");
  for (std::string word; controllers >> word;) {
    if (word == "memory") return true;
  }
  return false;
}

bool write(const fs::path& file, const std::string& text) {
  std::ofstream stream(file);
  stream << text << std::flush;
  return stream.good();
}

/// The number behind `key` in a file of such pairs; 0 where there is none.
int64_t number_of(const fs::path& file, const std::string& key) {
  std::ifstream stream(file);
  int64_t number = 0;
  for (std::string word; stream >> word;) {
    if (word == key && stream >> number) return number;
  }
  return 0;
}

fs::path folder_of(const std::string& prefix, int rank) { return prefix + "-" + std::to_string(rank); }

} // namespace

MemoryGroups::MemoryGroups(int ranks, int64_t bytes) {
  const bool is_second = is_version_2();
  prefix_ = (fs::path(is_second ? kVersion2 : kVersion1) / ("tessera-bench-" + std::to_string(getpid()))).string();
  for (int rank = 0; rank < ranks; ++rank) {
    const auto folder = folder_of(prefix_, rank);
    std::error_code error;
    const bool is_made = fs::create_directory(folder, error);
    if (is_made) folders_.push_back(folder);
    if (is_made && write(folder / (is_second ? "memory.max" : "memory.limit_in_bytes"), std::to_string(bytes))) continue;
    remove();
    return;
  }
}

MemoryGroups::~MemoryGroups() { remove(); }

/// A process that was killed leaves its group soon after.
void MemoryGroups::remove() {
  constexpr int kTries = 500;
  for (const auto& folder : folders_) {
    for (int i = 0; i < kTries && rmdir(folder.c_str()) != 0 && errno == EBUSY; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  folders_.clear();
}

std::optional<int> MemoryGroups::first_ended() const {
  for (size_t rank = 0; rank < folders_.size(); ++rank) {
    for (const char* file : {"memory.oom_control", "memory.events"}) {
      if (number_of(folders_[rank] / file, "oom_kill") > 0) return static_cast<int>(rank);
    }
  }
  return std::nullopt;
}

int64_t MemoryGroups::peak() const {
  int64_t largest = 0;
  for (const auto& folder : folders_) {
    for (const char* file : {"memory.max_usage_in_bytes", "memory.peak"}) {
      int64_t bytes = 0;
      if (std::ifstream(folder / file) >> bytes) largest = std::max(largest, bytes);
    }
  }
  return largest;
}

void enter_memory_group(const std::string& prefix, int rank) {
  const auto file = folder_of(prefix, rank) / "cgroup.procs";
  TORCH_CHECK(write(file, std::to_string(getpid())), file.string(), ": rank ", rank, " cannot enter the group");
}

void limit_data_segment(int64_t bytes) {
  const int64_t now = 1024 * number_of("/proc/self/status", "VmData:");
  const auto most = static_cast<rlim_t>(now + bytes);
  const rlimit limit{most, most};
  TORCH_CHECK(setrlimit(RLIMIT_DATA, &limit) == 0, "the data segment cannot be limited to ", most,
              " bytes: ", std::strerror(errno));
}

int64_t largest_resident_set() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return 1024 * usage.ru_maxrss;
}

} // namespace tessera::benchmarks
