#include <tessera/parallel/context/block_kernels.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>

#include <tessera/base/meta_device.h>

namespace tessera::internal {

namespace {

std::optional<at::Tensor> mask_of(const Block& block) { return block.mask.defined() ? std::optional(block.mask) : std::nullopt; }

/// Keys or values with the heads of the query, for kernels that want these.
at::Tensor with_heads(const at::Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}

/// The gradient of `with_heads`.
at::Tensor sum_heads(const at::Tensor& gradient, int64_t heads) {
  return gradient.size(1) == heads ? gradient : gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

/// Kernels say something else of a row that sees no key.
at::Tensor lse_of_rows(at::Tensor lse, const at::Tensor& mask) {
  if (!mask.defined()) return lse;
  const auto sees_none = mask.eq(-kInfinity).all(-1).expand(lse.sizes());
  return lse.masked_fill(sees_none, -kInfinity);
}

// _scaled_dot_product_flash_attention_for_cpu. In half precision it would round each block, and the sums of these once more.

Block in_fp32(const Block& block) {
  const auto dtype = block.query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {block.query.to(dtype), block.key.to(dtype),
          block.value.to(dtype), block.mask.defined() ? block.mask.to(dtype) : at::Tensor(),
          block.is_causal,       block.scale};
}

BlockResult attend_on_cpu(const Block& given) {
  const auto block = in_fp32(given);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(block.query, block.key, block.value, 0.0, block.is_causal,
                                                                    mask_of(block), block.scale);
  return {out, lse};
}

BlockGradients backward_on_cpu(const Block& given, const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& lse) {
  const auto block = in_fp32(given);
  const auto dtype = block.query.scalar_type();
  const auto as_given = lse.transpose(1, 2).contiguous().transpose(1, 2); // [b, l, h] in memory, as the forward returns it
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient.to(dtype), block.query, block.key, block.value, out.to(dtype), as_given, 0.0, block.is_causal, mask_of(block),
      block.scale);
  return {query, key, value};
}

// _scaled_dot_product_flash_attention.

BlockResult attend_by_flash(const Block& block) {
  const auto heads = block.query.size(1);
  auto result = at::_scaled_dot_product_flash_attention(block.query, with_heads(block.key, heads), with_heads(block.value, heads),
                                                        0.0, block.is_causal, /*return_debug_mask=*/false, block.scale);
  return {std::get<0>(result), std::get<1>(result)};
}

BlockGradients backward_by_flash(const Block& block, const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& lse) {
  const auto heads = block.query.size(1), key_heads = block.key.size(1);
  const auto random = block.query.options().dtype(at::kUInt64); // of a dropout, which there is none of
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_backward(
      gradient, block.query, with_heads(block.key, heads), with_heads(block.value, heads), out, lse, /*cum_seq_q=*/{},
      /*cum_seq_k=*/{}, block.query.size(2), block.key.size(2), 0.0, block.is_causal, at::empty({2}, random),
      at::empty({}, random), block.scale);
  return {query, sum_heads(key, key_heads), sum_heads(value, key_heads)};
}

// _scaled_dot_product_efficient_attention.

/// `tensor` with a last dim that is a multiple of `multiple`: what is added is 0.
at::Tensor padded(const at::Tensor& tensor, int64_t multiple) {
  const auto missing = (multiple - tensor.size(-1) % multiple) % multiple;
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing}, 0);
}

/// The kernel reads a mask of the query's batch and heads, whose rows are aligned.
std::optional<at::Tensor> aligned_mask(const Block& block) {
  if (!block.mask.defined()) return std::nullopt;
  constexpr int64_t kAlignment = 16;
  const auto keys = block.key.size(2);
  return padded(block.mask, kAlignment)
      .narrow(-1, 0, keys)
      .expand({block.query.size(0), block.query.size(1), block.query.size(2), keys});
}

BlockResult attend_efficiently(const Block& block) {
  const auto heads = block.query.size(1);
  auto result = at::_scaled_dot_product_efficient_attention(block.query, with_heads(block.key, heads),
                                                            with_heads(block.value, heads), aligned_mask(block),
                                                            /*compute_log_sumexp=*/true, 0.0, block.is_causal, block.scale);
  return {std::get<0>(result), std::get<1>(result).narrow(2, 0, block.query.size(2))};
}

BlockGradients backward_efficiently(const Block& block, const at::Tensor& gradient, const at::Tensor& out,
                                    const at::Tensor& lse) {
  constexpr int64_t kAlignment = 32; // of the rows of `lse`
  const auto heads = block.query.size(1), key_heads = block.key.size(1);
  const auto random = at::empty({}, block.query.options().dtype(at::kLong));
  auto [query, key, value, mask] = at::_scaled_dot_product_efficient_attention_backward(
      gradient, block.query, with_heads(block.key, heads), with_heads(block.value, heads),
      aligned_mask(block).value_or(at::Tensor()), out, padded(lse, kAlignment), random, random, 0.0, {true, true, true, false},
      block.is_causal, block.scale);
  return {query, sum_heads(key, key_heads), sum_heads(value, key_heads)};
}

// Products and exponentials.

/// A block in the dtype in which it is computed, with the keys of each head.
struct WideBlock {
  explicit WideBlock(const Block& block)
      : dtype(block.query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
        query(block.query.to(dtype)),
        key(with_heads(block.key.to(dtype), query.size(1))),
        value(with_heads(block.value.to(dtype), query.size(1))) {}

  at::Tensor scores(const Block& block) const {
    auto scores = at::matmul(query, key.transpose(-2, -1)).mul_(block.scale);
    if (block.mask.defined()) scores = scores + block.mask.to(dtype);
    if (!block.is_causal) return scores;
    const auto sees = at::ones({query.size(2), key.size(2)}, scores.options().dtype(at::kBool)).tril();
    return scores.masked_fill(sees.logical_not(), -kInfinity);
  }

  at::ScalarType dtype;
  at::Tensor query, key, value;
};

/// exp(scores - lse), 0 in rows that see no key.
at::Tensor weights_of(const at::Tensor& scores, const at::Tensor& lse) {
  return (scores - lse.masked_fill(lse.eq(-kInfinity), kInfinity).unsqueeze(-1)).exp_();
}

BlockResult attend_by_math(const Block& block) {
  const WideBlock wide(block);
  const auto scores = wide.scores(block);
  const auto lse = at::logsumexp(scores, -1);
  return {at::matmul(weights_of(scores, lse), wide.value), lse};
}

BlockGradients backward_by_math(const Block& block, const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& lse) {
  const WideBlock wide(block);
  const auto weights = weights_of(wide.scores(block), lse), upstream = gradient.to(wide.dtype);
  const auto of_weights = at::matmul(upstream, wide.value.transpose(-2, -1));
  const auto of_scores = weights * (of_weights - (upstream * out.to(wide.dtype)).sum(-1, /*keepdim=*/true)) * block.scale;
  const auto key_heads = block.key.size(1);
  return {at::matmul(of_scores, wide.key), sum_heads(at::matmul(of_scores.transpose(-2, -1), wide.query), key_heads),
          sum_heads(at::matmul(weights.transpose(-2, -1), upstream), key_heads)};
}

BlockKernel kernel_for(const Block& block) {
  const auto device = block.query.is_meta() ? device_behind_meta() : block.query.device().type();
  return internal::kernel_for(
      BlockKind{device, block.query.scalar_type(), block.query.size(3), block.value.size(3), block.mask.defined()});
}

BlockResult run(const Block& block) {
  switch (kernel_for(block)) {
    case BlockKernel::kFlashCpu: return attend_on_cpu(block);
    case BlockKernel::kFlash: return attend_by_flash(block);
    case BlockKernel::kEfficient: return attend_efficiently(block);
    case BlockKernel::kMath: return attend_by_math(block);
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace

BlockKernel kernel_for(const BlockKind& kind) {
  const bool is_half = kind.dtype == at::kHalf || kind.dtype == at::kBFloat16;
  if (kind.features == 0 || kind.value_features == 0) return BlockKernel::kMath;
  if (kind.device == at::kCPU) return kind.features == kind.value_features ? BlockKernel::kFlashCpu : BlockKernel::kMath;
  if (kind.device != at::kCUDA || (!is_half && kind.dtype != at::kFloat)) return BlockKernel::kMath;
  constexpr int64_t kAlignment = 8, kMostFeatures = 256; // of the rows, for kFlash
  if (kind.features % kAlignment != 0 || kind.value_features % kAlignment != 0) return BlockKernel::kMath;
  const bool fits_flash = is_half && !kind.has_mask && kind.features == kind.value_features && kind.features <= kMostFeatures;
  return fits_flash ? BlockKernel::kFlash : BlockKernel::kEfficient;
}

BlockResult attend(const Block& block) {
  auto result = run(block);
  result.lse = lse_of_rows(result.lse, block.mask);
  return result;
}

BlockGradients attend_backward(const Block& block, const at::Tensor& gradient, const at::Tensor& out, const at::Tensor& lse) {
  const auto without_holes = lse.masked_fill(lse.eq(-kInfinity), kInfinity); // a row that sees no key has weights exp(-inf)
  switch (kernel_for(block)) {
    case BlockKernel::kFlashCpu: return backward_on_cpu(block, gradient, out, without_holes);
    case BlockKernel::kFlash: return backward_by_flash(block, gradient, out, without_holes);
    case BlockKernel::kEfficient: return backward_efficiently(block, gradient, out, without_holes);
    case BlockKernel::kMath: return backward_by_math(block, gradient, out, lse);
  }
  TORCH_INTERNAL_ASSERT(false);
}

} // namespace tessera::internal
