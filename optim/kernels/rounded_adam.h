#pragma once

// Internal: a step of Adam whose moments are kept in bf16, on the CPU.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include <tessera/optim/parts/fused_lists.h>

namespace tessera::internal {

/// A random number for an element of a parameter: a function of these three alone (the integer hash "lowbias32" of Wellons, of
/// the two halves of the position).
uint32_t rounding_bits(uint64_t seed, int64_t step, int64_t position);

/// Rounds to one of the two bf16 beside `value`: to the upper one with the probability of its distance from the lower one, where
/// `random`, of 16 bits, is uniform. Infinities stay, and NaN stays one. Returns the bits.
uint16_t round_stochastically(float value, uint32_t random);

/// Parts of one parameter on this rank, row-major.
struct RoundedAdamMemory {
  at::Tensor parameter;           ///< float, double, bf16 or half
  at::Tensor gradient;            ///< of the same dtype
  at::Tensor exp_avg, exp_avg_sq; ///< bf16
};

/// Steps the part, in float or, where the parameter is one, in double. The parameter takes moments that are not rounded yet;
/// those that are kept are rounded stochastically: exp_avg by the lower half of `rounding_bits` of its place in the flattened
/// parameter `like`, exp_avg_sq by the upper one. So the numbers are the same however the parameter is split.
void rounded_adam_step(const at::Tensor& like, const RoundedAdamMemory& memory, const FusedAdamSettings& settings, int64_t step,
                       uint64_t seed);

} // namespace tessera::internal
