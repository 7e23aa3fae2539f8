#include <tessera/mixed_precision/codecs/operator_codec.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>

#include <limits>

namespace tessera::internal {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The numbers of a range in rows of a block, in fp32; the last one is filled up with zeros.
at::Tensor blocks_in(const BlockCodec& codec, const CodedRange& range, const at::Tensor& values) {
  const auto numbers = values.narrow(0, range.first, range.numel).to(at::kFloat);
  const int64_t blocks = codec.blocks(range.numel);
  return at::constant_pad_nd(numbers, {0, blocks * codec.block - range.numel}).view({blocks, codec.block});
}

double parts_of_wire(Wire wire) { return wire == Wire::kInt8 ? 127 : wire == Wire::kInt4 ? 7 : 448; }

at::Tensor scales_of(const BlockCodec& codec, const CodedRange& range, const at::Tensor& rows) {
  auto scales = rows.abs().amax({1}).div(parts_of_wire(codec.wire));
  if (codec.wire == Wire::kSign) {
    auto counts = at::arange(1, rows.size(0) + 1, scales.options()).mul(codec.block).clamp_max(static_cast<double>(range.numel));
    counts.slice(0, 1).sub_(at::arange(1, rows.size(0), scales.options()).mul(codec.block));
    scales = rows.abs().div(counts.unsqueeze(1)).sum({1});
  }
  return at::where(scales.isfinite(), scales, kNaN).to(at::kFloat);
}

at::Tensor weights_of_bits(const at::Tensor& like) { return at::pow(2, at::arange(8, like.options().dtype(at::kInt))); }

/// [blocks, bytes of one]
at::Tensor codes_of(Wire wire, const at::Tensor& rows, const at::Tensor& scales) {
  const auto usable = scales.gt(0).unsqueeze(1);
  const auto parts = parts_of_wire(wire);
  const auto quantized = at::where(usable, rows.div(scales.unsqueeze(1)).clamp(-parts, parts), 0).to(at::kFloat);
  if (wire == Wire::kInt8) return quantized.round().to(at::kChar).view(at::kByte);
  if (wire == Wire::kFloat8) return quantized.to(at::kFloat8_e4m3fn).view(at::kByte);
  if (wire == Wire::kInt4) {
    const auto pairs = quantized.round().add(8).to(at::kInt).view({rows.size(0), -1, 2});
    return pairs.select(2, 0).add(pairs.select(2, 1), 16).to(at::kByte);
  }
  const auto bits = rows.ge(0).logical_and(usable).to(at::kInt).view({rows.size(0), -1, 8});
  return bits.mul(weights_of_bits(rows)).sum({2}).to(at::kByte);
}

at::Tensor numbers_in(Wire wire, const at::Tensor& codes) {
  if (wire == Wire::kInt8) return codes.view(at::kChar).to(at::kFloat);
  if (wire == Wire::kFloat8) return codes.view(at::kFloat8_e4m3fn).to(at::kFloat);
  const auto bytes = codes.to(at::kInt).unsqueeze(1);
  const auto flat = [](const at::Tensor& columns) { return columns.reshape({-1}).to(at::kFloat); };
  if (wire == Wire::kInt4) {
    const auto places = at::arange(2, bytes.options()).mul(4);
    return flat(bytes.bitwise_right_shift(places).bitwise_and(0xF).sub(8));
  }
  return flat(bytes.bitwise_right_shift(at::arange(8, bytes.options())).bitwise_and(1).mul(2).sub(1));
}

struct Coded {
  at::Tensor scales, codes;
};

Coded coded_at(const BlockCodec& codec, const CodedRange& range, const at::Tensor& bytes) {
  const int64_t size = 4 * codec.blocks(range.numel);
  return {bytes.narrow(0, range.byte, size), bytes.narrow(0, range.byte + size, codec.code_bytes(range.numel))};
}

/// The numbers of a range as they arrive.
at::Tensor numbers_after(const BlockCodec& codec, const CodedRange& range, const at::Tensor& bytes) {
  const auto [scales, codes] = coded_at(codec, range, bytes);
  const auto numbers = numbers_in(codec.wire, codes).narrow(0, 0, range.numel);
  return numbers.mul(scales.clone().view(at::kFloat).repeat_interleave(codec.block).narrow(0, 0, range.numel));
}

} // namespace

void encode_by_operators(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& values,
                         const at::Tensor& bytes, const at::Tensor& residual) {
  for (const auto& range : ranges) {
    if (range.numel == 0) continue;
    auto rows = blocks_in(codec, range, values);
    if (residual.defined()) rows = rows + blocks_in(codec, range, residual);
    const auto scales = scales_of(codec, range, rows);
    const auto [to_scales, to_codes] = coded_at(codec, range, bytes);
    to_scales.copy_(scales.contiguous().view(at::kByte));
    to_codes.copy_(codes_of(codec.wire, rows, scales).reshape({-1}).narrow(0, 0, to_codes.numel()));
    if (!residual.defined()) continue;
    const auto sent = numbers_after(codec, range, bytes);
    const auto kept = residual.narrow(0, range.first, range.numel);
    kept.copy_(at::where(sent.isnan(), kept, rows.view({-1}).narrow(0, 0, range.numel).sub(sent)));
  }
}

void decode_by_operators(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& bytes,
                         const at::Tensor& values, DecodeInto into) {
  for (const auto& range : ranges) {
    if (range.numel == 0) continue;
    const auto numbers = numbers_after(codec, range, bytes), to = values.narrow(0, range.first, range.numel);
    if (into == DecodeInto::kAdd) {
      to.add_(numbers);
    } else {
      to.copy_(numbers);
    }
  }
}

} // namespace tessera::internal
