#pragma once

// What random programs of DTensors draw: numbers, values and placements.

#include <random>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing {

/// Draws from a seed, alike with every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t bound) { return bound <= 0 ? 0 : static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound)); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename List>
  const auto& of(const List& list) {
    return list[static_cast<size_t>(below(static_cast<int64_t>(std::size(list))))];
  }
  /// Multiples of 1/64, so that the parts of a Partial add up without rounding.
  at::Tensor values(const std::vector<int64_t>& sizes) { return integers(sizes, 257).sub(128).to(torch::kDouble).div(64); }
  at::Tensor integers(const std::vector<int64_t>& sizes, int64_t bound) {
    auto result = torch::empty(sizes, torch::kLong);
    for (int64_t i = 0; i < result.numel(); ++i) result.data_ptr<int64_t>()[i] = below(bound);
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

inline bool is_real(const at::Tensor& tensor) { return tensor.scalar_type() == torch::kDouble; }

/// Placements of a tensor of `sizes` on a mesh of `mesh_shape`; with `reductions`, Partial ones as well.
Placements draw_placements(Random& random, const std::vector<int64_t>& sizes, const std::vector<int64_t>& mesh_shape,
                           bool reductions);

} // namespace tessera::testing
