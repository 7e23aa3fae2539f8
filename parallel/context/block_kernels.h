#pragma once

// Internal: attention of some queries over some keys, by a kernel of PyTorch's.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

namespace tessera::internal {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Which kernel computes a block.
enum class BlockKernel : uint8_t {
  kFlashCpu,  ///< _scaled_dot_product_flash_attention_for_cpu
  kFlash,     ///< _scaled_dot_product_flash_attention: of CUDA, in half precision, without a mask
  kEfficient, ///< _scaled_dot_product_efficient_attention: of CUDA
  kMath,      ///< products and exponentials, in fp32 or fp64
};

/// What the choice depends on; the same on all ranks.
struct BlockKind {
  at::DeviceType device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  int64_t features = 0, value_features = 0;
  bool has_mask = false;
};
BlockKernel kernel_for(const BlockKind& kind);

/// query [b, h, l, e], key [b, g, s, e] and value [b, g, s, v], where g divides h. `mask`: undefined, or in the query's dtype,
/// added to the scores, [1 or b, 1 or h, l, s]. `is_causal`: with l = s.
struct Block {
  at::Tensor query, key, value, mask;
  bool is_causal = false;
  double scale = 1;
};

struct BlockResult {
  at::Tensor out; ///< [b, h, l, v] in the query's dtype; 0 in a row that sees no key
  at::Tensor lse; ///< [b, h, l], fp32 or fp64: the logarithm of the sum of exponentials; -inf in a row that sees no key
};
BlockResult attend(const Block& block);

struct BlockGradients {
  at::Tensor query, key, value;
};
/// Gradients of what the block adds, where `out` and `lse` are those of all blocks of its queries; `lse` is -inf in rows that see
/// no key at all.
BlockGradients attend_backward(const Block& block, const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& lse);

} // namespace tessera::internal
