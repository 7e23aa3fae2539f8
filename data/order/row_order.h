#pragma once

// Internal: the order of the rows of an epoch.

#include <array>
#include <cstdint>
#include <variant>
#include <vector>

namespace tessera::internal {

/// A pseudorandom permutation of 0 … n - 1 that is computed place by place and takes no memory: a Feistel network of eight rounds
/// over the smallest power of two that holds n, whose results beyond n are put through it again (cycle walking; Black and
/// Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Fewer than two runs a place on average.
class ComputedPermutation {
 public:
  ComputedPermutation(int64_t n, uint64_t seed);
  int64_t operator[](int64_t place) const;

 private:
  static constexpr size_t kRounds = 8; // an even number, so that both parts have their first widths again

  uint64_t encrypt(uint64_t value) const;

  uint64_t n_;
  int low_bits_, high_bits_;
  std::array<uint64_t, kRounds> keys_;
};

/// Which row comes at each place of an epoch.
class RowOrder {
 public:
  /// The order of the data.
  RowOrder() = default;
  /// Drawn as a whole, as torch.randperm draws with this seed: 8 bytes a row.
  static RowOrder drawn(int64_t rows, uint64_t seed);
  static RowOrder computed(int64_t rows, uint64_t seed);

  /// The row at a place below the number of rows.
  int64_t operator[](int64_t place) const;

 private:
  struct AsTheDataAre {};
  std::variant<AsTheDataAre, std::vector<int64_t>, ComputedPermutation> order_;
};

} // namespace tessera::internal
