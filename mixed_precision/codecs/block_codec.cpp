#include <tessera/mixed_precision/block_codec.h>

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <vector>

#include <tessera/mixed_precision/codecs/block_kernels.h>
#include <tessera/mixed_precision/codecs/operator_codec.h>

#if defined(__x86_64__)
#define TESSERA_AVX2 __attribute__((target("avx2")))
#else
#define TESSERA_AVX2
#endif

namespace tessera {

std::string_view to_string(Wire wire) {
  switch (wire) {
    case Wire::kInt8: return "int8";
    case Wire::kInt4: return "int4";
    case Wire::kFloat8: return "fp8";
    case Wire::kSign: return "sign";
  }
  return "unknown";
}

int64_t BlockCodec::blocks(int64_t numel) const {
  check_codec(*this, "a codec");
  return at::ceil_div(numel, block);
}

int64_t BlockCodec::code_bytes(int64_t numel) const {
  check_codec(*this, "a codec");
  if (wire == Wire::kInt4) return at::ceil_div(numel, int64_t{2});
  return wire == Wire::kSign ? at::ceil_div(numel, int64_t{8}) : numel;
}

int64_t BlockCodec::bytes(int64_t numel) const {
  return at::round_up(blocks(numel) * static_cast<int64_t>(sizeof(float)) + code_bytes(numel), int64_t{sizeof(float)});
}

double BlockCodec::largest_error() const {
  switch (wire) {
    case Wire::kInt8: return 0.5 / 127;
    case Wire::kInt4: return 0.5 / 7;
    case Wire::kFloat8: return 1.0 / 28; // half of the distance of 416 and 448, by 448
    case Wire::kSign: break;
  }
  return 1;
}

void check_codec(const BlockCodec& codec, std::string_view who) {
  constexpr int64_t kLargest = 65536;
  TORCH_CHECK_VALUE(codec.block >= 8 && codec.block <= kLargest && codec.block % 8 == 0, who, ": blocks of ", codec.block,
                    " numbers, but a block has a multiple of 8 between 8 and ", kLargest);
}

namespace internal {

namespace {

/// What a thread codes: blocks of one range. The tensors' memory, at the range.
struct BlockRun {
  int64_t first, last, block, numel;
  float* scales;
  uint8_t* codes;
};

template <Wire kWire, typename T, bool kKeeps>
[[gnu::always_inline]] inline void encode_blocks(const BlockRun& run, int64_t block_bytes, const T* values, float* residual) {
  for (int64_t i = run.first; i < run.last; ++i) {
    const int64_t begin = i * run.block, count = std::min(run.block, run.numel - begin);
    const int64_t bytes = kWire == Wire::kInt4 ? (count + 1) / 2 : kWire == Wire::kSign ? (count + 7) / 8 : count;
    encode_block<kWire, T, kKeeps>(values + begin, kKeeps ? residual + begin : nullptr, count, run.scales + i,
                                   run.codes + i * block_bytes, bytes);
  }
}

template <Wire kWire, typename T, bool kAdds>
[[gnu::always_inline]] inline void decode_blocks(const BlockRun& run, int64_t block_bytes, T* values) {
  for (int64_t i = run.first; i < run.last; ++i) {
    const int64_t begin = i * run.block, count = std::min(run.block, run.numel - begin);
    decode_block<kWire, T, kAdds>(run.scales[i], run.codes + i * block_bytes, count, values + begin);
  }
}

template <Wire kWire, typename T, bool kKeeps>
TESSERA_AVX2 void encode_wide(const BlockRun& run, int64_t block_bytes, const T* values, float* residual) {
  encode_blocks<kWire, T, kKeeps>(run, block_bytes, values, residual);
}

template <Wire kWire, typename T, bool kAdds>
TESSERA_AVX2 void decode_wide(const BlockRun& run, int64_t block_bytes, T* values) {
  decode_blocks<kWire, T, kAdds>(run, block_bytes, values);
}

bool has_wide() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
#else
  return false;
#endif
}

/// Calls `visit` (range, first block, last block) for all blocks of all ranges, from several threads.
template <typename Visit>
void for_each_block_run(const BlockCodec& codec, std::span<const CodedRange> ranges, const Visit& visit) {
  constexpr int64_t kNumbersATask = 16384;
  std::vector<int64_t> ends; // in blocks, of each range
  int64_t total = 0;
  for (const auto& range : ranges) ends.push_back(total += codec.blocks(range.numel));
  at::parallel_for(0, total, std::max<int64_t>(1, kNumbersATask / codec.block), [&](int64_t begin, int64_t end) {
    auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t start = at == 0 ? 0 : ends[at - 1], stop = std::min(end, ends[at]);
      if (stop > begin) visit(ranges[at], begin - start, stop - start);
      begin = std::max(begin, stop);
      ++at;
    }
  });
}

BlockRun block_run(const BlockCodec& codec, const CodedRange& range, int64_t first, int64_t last, uint8_t* bytes) {
  auto* const at = bytes + range.byte;
  return {first, last, codec.block, range.numel, reinterpret_cast<float*>(at), at + 4 * codec.blocks(range.numel)};
}

template <Wire kWire, typename T, bool kKeeps>
void encode_as(const BlockCodec& codec, std::span<const CodedRange> ranges, const T* values, float* residual, uint8_t* bytes) {
  const int64_t block_bytes = codec.code_bytes(codec.block);
  const auto kernel = has_wide() ? &encode_wide<kWire, T, kKeeps> : &encode_blocks<kWire, T, kKeeps>;
  for_each_block_run(codec, ranges, [&](const CodedRange& range, int64_t first, int64_t last) {
    kernel(block_run(codec, range, first, last, bytes), block_bytes, values + range.first,
           kKeeps ? residual + range.first : nullptr);
  });
}

template <Wire kWire, typename T, bool kAdds>
void decode_as(const BlockCodec& codec, std::span<const CodedRange> ranges, uint8_t* bytes, T* values) {
  const int64_t block_bytes = codec.code_bytes(codec.block);
  const auto kernel = has_wide() ? &decode_wide<kWire, T, kAdds> : &decode_blocks<kWire, T, kAdds>;
  for_each_block_run(codec, ranges, [&](const CodedRange& range, int64_t first, int64_t last) {
    kernel(block_run(codec, range, first, last, bytes), block_bytes, values + range.first);
  });
}

/// Calls `visit` with the dtype, as a value of it, and the wire as a constant.
template <typename Visit>
void with_dtype(c10::ScalarType dtype, const Visit& visit) {
  switch (dtype) {
    case c10::ScalarType::Float: return visit(0.0F);
    case c10::ScalarType::Double: return visit(0.0);
    case c10::ScalarType::Half: return visit(c10::Half());
    case c10::ScalarType::BFloat16: return visit(c10::BFloat16());
    default: TORCH_CHECK_VALUE(false, "numbers of ", dtype, " have no codes: fp32, fp64, fp16 and bf16 have");
  }
}

template <Wire kWire>
using WireConstant = std::integral_constant<Wire, kWire>;

template <typename Visit>
void with_wire(Wire wire, const Visit& visit) {
  switch (wire) {
    case Wire::kInt8: return visit(WireConstant<Wire::kInt8>());
    case Wire::kInt4: return visit(WireConstant<Wire::kInt4>());
    case Wire::kFloat8: return visit(WireConstant<Wire::kFloat8>());
    case Wire::kSign: return visit(WireConstant<Wire::kSign>());
  }
}

void check_ranges(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& values,
                  const at::Tensor& bytes) {
  TORCH_CHECK_VALUE(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && values.is_contiguous(),
                    "codes are contiguous bytes of contiguous numbers, but these are ", bytes.scalar_type(), " of ",
                    values.scalar_type());
  for (const auto& range : ranges) {
    TORCH_CHECK_VALUE(range.numel >= 0 && range.first >= 0 && range.first + range.numel <= values.numel() && range.byte >= 0 &&
                          range.byte % 4 == 0 && range.byte + codec.bytes(range.numel) <= bytes.numel(),
                      "codes of the numbers [", range.first, ", ", range.first + range.numel, ") of ", values.numel(),
                      " at byte ", range.byte, " of ", bytes.numel());
  }
}

} // namespace

} // namespace internal

void encode(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& values, const at::Tensor& bytes,
            const at::Tensor& residual) {
  check_codec(codec, "encode");
  internal::check_ranges(codec, ranges, values, bytes);
  TORCH_CHECK_VALUE(!residual.defined() || (residual.scalar_type() == at::kFloat && residual.numel() == values.numel()),
                    "encode: the residual has ", residual.numel(), " numbers of ", residual.scalar_type(), ", but ",
                    values.numel(), " of Float belong to the values");
  if (values.is_meta()) return; // there are none
  if (!values.is_cpu()) return internal::encode_by_operators(codec, ranges, values, bytes, residual);
  auto* const to = bytes.mutable_data_ptr<uint8_t>();
  internal::with_dtype(values.scalar_type(), [&]<typename T>(T) {
    const auto* const from = values.const_data_ptr<T>();
    internal::with_wire(codec.wire, [&]<Wire kWire>(internal::WireConstant<kWire>) {
      if (residual.defined()) {
        internal::encode_as<kWire, T, true>(codec, ranges, from, residual.mutable_data_ptr<float>(), to);
      } else {
        internal::encode_as<kWire, T, false>(codec, ranges, from, nullptr, to);
      }
    });
  });
}

void decode(const BlockCodec& codec, std::span<const CodedRange> ranges, const at::Tensor& bytes, const at::Tensor& values,
            DecodeInto into) {
  check_codec(codec, "decode");
  internal::check_ranges(codec, ranges, values, bytes);
  if (values.is_meta()) return;
  if (!values.is_cpu()) return internal::decode_by_operators(codec, ranges, bytes, values, into);
  auto* const from = const_cast<uint8_t*>(bytes.const_data_ptr<uint8_t>()); // which nothing writes
  internal::with_dtype(values.scalar_type(), [&]<typename T>(T) {
    auto* const to = values.mutable_data_ptr<T>();
    internal::with_wire(codec.wire, [&]<Wire kWire>(internal::WireConstant<kWire>) {
      if (into == DecodeInto::kAdd) {
        internal::decode_as<kWire, T, true>(codec, ranges, from, to);
      } else {
        internal::decode_as<kWire, T, false>(codec, ranges, from, to);
      }
    });
  });
}

} // namespace tessera
