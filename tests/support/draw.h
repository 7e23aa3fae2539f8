#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace tessera::testing {

/// Seeded draws that are the same on every rank and every machine.
class Draw {
 public:
  explicit Draw(uint64_t seed) : engine_(seed) {}
  /// 0 … bound - 1.
  int64_t below(int64_t bound) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound)); }
  bool chance(int64_t percent) { return below(100) < percent; }
  template <typename T>
  const T& of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }
  /// The seed of another generator.
  uint64_t seed() { return engine_() >> 32; }

 private:
  std::mt19937_64 engine_;
};

} // namespace tessera::testing
