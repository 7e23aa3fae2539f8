#pragma once

#include <tessera/tests/support/simulated_device/clock.h>
#include <tessera/tests/support/simulated_device/region.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing::sim {

/// An access of a launch to memory.
struct Use {
  Region region;
  bool writes;
};

/// What is launched on a stream: its uses count as accesses of that operator.
struct Launched {
  std::string name;
  std::string stream; ///< its name
  Position position;  ///< its own
};

/// Finds races: two accesses to the same bytes, one of them a write, that no stream order, event or synchronization puts one
/// after the other. It compares vector clocks, not times: a race is found in every run, whichever access comes first in it.
class Checker {
 public:
  /// Memory whose accesses are compared, from now on.
  void track(const void* begin, size_t size);
  void untrack(const void* begin);
  /// The memory at `begin` is handed out again. What is still done with it from before is a race with its new owner.
  void begin_new_life(const void* begin);
  /// Nothing races any more with what `done` covers of the accesses to the memory at `begin`.
  void settle(const void* begin, const Clock& done);

  /// Compares the uses with earlier ones. `known` is what the launch comes after.
  void note(Launched launched, const std::vector<Use>& uses, const Clock& known);

  /// The races so far, each with the number of times that it was found.
  std::map<std::string, int64_t> races() const;
  void reset();

 private:
  struct Access {
    Region region;
    bool writes;
    int64_t life;
    std::shared_ptr<const Launched> by;
  };
  struct Memory {
    const char* end;
    int64_t life = 0;
    std::vector<Access> accesses;
  };

  Memory* find(const char* address);
  void report(const Access& earlier, const Access& later);

  mutable std::mutex mutex_;
  std::map<const char*, Memory> memory_; // by its first byte
  std::map<std::string, int64_t> races_;
};

} // namespace tessera::testing::sim
