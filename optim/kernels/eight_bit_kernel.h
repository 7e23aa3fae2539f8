#pragma once

// Internal: the step of AdamW8bit on the CPU, a block at a time.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::internal {

inline constexpr int kEightBitBlockBits = 8; ///< 256 elements a block

/// The numbers of a step, as ATen's operators round them.
struct EightBitNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
};

/// The memory of a step: parts of one parameter on this rank, row-major; of the moments' scales all blocks.
struct EightBitMemory {
  at::Tensor parameter; ///< the part, float, double, bf16 or half
  at::Tensor gradient;  ///< the part, float
  at::Tensor codes, squared_codes;
  at::Tensor absmax, squared_absmax; ///< of before the step
};

/// A step in two calls around the reduction over ranks of `largest` ([2, blocks], zeros before).
///
/// `begin` writes the largest elements of this rank's parts of the blocks, and steps the blocks that this rank has whole.
/// `finish` steps the others, given the largest elements over all ranks. `like` is the parameter, plain or a DTensor. The numbers
/// are those of the operators of ATen that AdamW8bit takes on other devices, to the bit; but roots are rounded correctly, which
/// MKL's are not.
void begin_eight_bit_step(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers,
                          const at::Tensor& largest);
void finish_eight_bit_step(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers,
                           const at::Tensor& largest);

} // namespace tessera::internal
