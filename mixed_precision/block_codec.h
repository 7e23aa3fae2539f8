#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

/// What a number becomes on its way between ranks. All but a block's scale; the scale is an fp32 number of each block.
enum class Wire {
  kInt8,   ///< 8 bits: scale = max|v| / 127, code = v / scale rounded to the nearest (ties to the even one), in [-127, 127]
  kInt4,   ///< 4 bits: the same with 7; the earlier of two numbers has the low half of a byte, as code + 8
  kFloat8, ///< 8 bits: scale = max|v| / 448, code = v / scale in float8_e4m3fn
  kSign,   ///< 1 bit: scale = the mean of |v|, code = whether v >= 0; the earliest of eight has the lowest bit
};

/// "int8", "int4", "fp8", "sign".
std::string_view to_string(Wire wire);

/// Numbers in blocks, each of which has a scale of its own. A block that is all zeros has the scale 0. One with a number that is
/// not finite has the scale NaN, so that all of it arrives as NaN. Numbers are computed in fp32.
///
/// `numel` numbers become `bytes(numel)`: the scales, then the codes, padded to 4 bytes. The last block may be shorter.
struct BlockCodec {
  Wire wire = Wire::kInt8;
  int64_t block = 256; ///< numbers a scale

  /// Here and in the next two, an error of `check_codec`.
  int64_t blocks(int64_t numel) const;
  int64_t code_bytes(int64_t numel) const;
  int64_t bytes(int64_t numel) const;
  /// The largest |v - decoded v|, in parts of the largest |v| of a block: 1/254 for int8. For `kSign`, whose blocks share
  /// nothing but their mean, 1.
  double largest_error() const;

  friend bool operator==(const BlockCodec&, const BlockCodec&) = default;
};

/// An error unless `codec.block` is a multiple of 8 between 8 and 65536. `who` begins its text.
void check_codec(const BlockCodec& codec, std::string_view who);

/// Numbers that are coded together: where they lie among the numbers, and their codes among the bytes.
struct CodedRange {
  int64_t first = 0; ///< number
  int64_t numel = 0;
  int64_t byte = 0; ///< a multiple of 4
};

/// Writes the codes of `ranges` of `values` (flat; fp32, fp64, fp16 or bf16) to `bytes` (flat, uint8, on the same device).
///
/// With a `residual` (fp32, as many numbers as `values`), `values + residual` is coded, and the residual becomes what the codes
/// lack of it (error feedback). The residual of a block that is not finite stays as it is: the step of such gradients is skipped.
void encode(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& values, const at::Tensor& bytes,
            const at::Tensor& residual = {});

enum class DecodeInto { kWrite, kAdd };

/// Writes to `ranges` of `values` what their codes in `bytes` say, or adds it to what is there.
void decode(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& bytes, const at::Tensor& values,
            DecodeInto into = DecodeInto::kWrite);

} // namespace tessera
