#pragma once

#include <tessera/collectives/backends/shared_memory/memory/arena.h>

#include <sys/types.h>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tessera::internal::shared_memory {

/// The arenas of the ranks of this host, as this process sees them. One of them for all groups. Thread-safe.
class Arenas {
 public:
  /// This process's own; null where it may have none. Made at the first call, for one of `processes` on this host.
  std::shared_ptr<Arena> own(int processes);
  /// Returns where the arena of another rank lies here. Throws c10::Error where it cannot be opened.
  char* open(int64_t rank, pid_t process, int descriptor, int64_t bytes);

 private:
  std::mutex mutex_;
  bool made_ = false;
  std::shared_ptr<Arena> own_;
  std::map<int64_t, Segment> others_; // by rank
};

} // namespace tessera::internal::shared_memory
