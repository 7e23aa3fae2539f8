#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// A control group of Linux (v1 or v2) for each rank of a case, which refuses more memory than the limit. They are removed with
/// this, when all processes have left them.
class MemoryGroups {
 public:
  /// Makes none where the system does not let it.
  MemoryGroups(int ranks, int64_t bytes);
  ~MemoryGroups();
  MemoryGroups(const MemoryGroups&) = delete;
  MemoryGroups& operator=(const MemoryGroups&) = delete;

  /// What `enter_memory_group` takes; empty where there are none.
  std::string prefix() const { return folders_.empty() ? "" : prefix_; }
  /// The first rank of which the kernel has ended a process for its memory.
  std::optional<int> first_ended() const;
  /// The most bytes that the group of a rank held, pages of files included; 0 where the kernel does not say.
  int64_t peak() const;

 private:
  void remove();

  std::string prefix_;
  std::vector<std::filesystem::path> folders_;
};

/// Moves this process to the rank's group: what it allocates from here on counts. Throws c10::Error where that fails.
void enter_memory_group(const std::string& prefix, int rank);

/// Limits the data segment of this process to what it has now and `bytes` more. Pages of files and shared memory do not count.
void limit_data_segment(int64_t bytes);

/// The most that this process had in memory, in bytes: all that it loaded counts.
int64_t largest_resident_set();

} // namespace tessera::benchmarks
