#pragma once

// Internal: the codes of blocks by LibTorch's operators, for devices other than the CPU.

#include <ATen/core/Tensor.h>

#include <span>

#include <tessera/mixed_precision/block_codec.h>

namespace tessera::internal {

/// Do what `encode` and `decode` do. The numbers are the same; but the mean of `kSign` is summed in another order.
void encode_by_operators(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& values,
                         const at::Tensor& bytes, const at::Tensor& residual);
void decode_by_operators(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& bytes,
                         const at::Tensor& values, DecodeInto into);

} // namespace tessera::internal
