#include <tessera/optim/kernels/eight_bit_kernel.h>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include <tessera/optim/kernels/dynamic_table.h>
#include <tessera/optim/kernels/flat_runs.h>
#include <tessera/optim/kernels/wide.h>

namespace tessera::internal {

namespace {

constexpr int64_t kBlock = int64_t{1} << kEightBitBlockBits;
constexpr int64_t kGrain = 64; ///< blocks that a thread takes at once
using Floats = std::array<float, kBlock>;

/// A table of values, and where the nearest one to a float is found: by its upper half, and one comparison.
class NearestCode {
 public:
  explicit NearestCode(bool is_signed) {
    const auto values = dynamic_table(is_signed);
    std::copy(values.begin(), values.end(), values_.begin());
    for (size_t i = 0; i + 1 < values.size(); ++i) borders_[i] = (values[i + 1] + values[i]) * 0.5F;
    borders_.back() = std::numeric_limits<float>::infinity();
    for (uint32_t upper = 0; upper < kUppers; ++upper) first_[upper] = first_of(upper);
  }
  const float* values() const { return values_.data(); }
  uint8_t operator()(float value) const {
    const uint8_t first = first_[std::bit_cast<uint32_t>(value) >> 16];
    return static_cast<uint8_t>(first + (value > borders_[first] ? 1 : 0));
  }

 private:
  static constexpr uint32_t kUppers = 1 << 16;

  /// The code of the smallest float with these upper bits; the last one for NaN.
  uint8_t first_of(uint32_t upper) const {
    const bool is_negative = upper >> 15 != 0;
    const auto smallest = std::bit_cast<float>(upper << 16 | (is_negative ? 0xFFFFU : 0U));
    const auto largest = std::bit_cast<float>(upper << 16 | (is_negative ? 0U : 0xFFFFU));
    if (std::isnan(smallest) || std::isnan(largest))
      return std::isinf(largest) || std::isinf(smallest) ? infinite(is_negative) : 255;
    const auto code = [&](float value) {
      return std::lower_bound(borders_.begin(), borders_.end() - 1, value) - borders_.begin();
    };
    TORCH_INTERNAL_ASSERT(code(largest) - code(smallest) <= 1);
    return static_cast<uint8_t>(code(smallest));
  }
  static uint8_t infinite(bool is_negative) { return is_negative ? 0 : 255; }

  std::array<float, 256> values_{}, borders_{};
  std::array<uint8_t, kUppers> first_{};
};

const NearestCode& nearest_code(bool is_signed) {
  static const NearestCode with_sign(true), without(false);
  return is_signed ? with_sign : without;
}

/// What the operators of ATen take.
struct Factors {
  explicit Factors(const EightBitNumbers& numbers)
      : beta1(static_cast<float>(numbers.beta1)),
        rest1(static_cast<float>(1 - numbers.beta1)),
        beta2(static_cast<float>(numbers.beta2)),
        rest2(static_cast<float>(1 - numbers.beta2)),
        root(static_cast<float>(std::sqrt(1 - std::pow(numbers.beta2, static_cast<double>(numbers.step))))),
        eps(static_cast<float>(numbers.eps)),
        size(static_cast<float>(-numbers.lr / (1 - std::pow(numbers.beta1, static_cast<double>(numbers.step))))) {}
  float beta1, rest1, beta2, rest2, root, eps, size;
};

/// Elements of one block that follow one another.
struct Segment {
  const float* gradient;
  uint8_t *codes, *squared;
  int64_t length;
  float absmax, squared_absmax; ///< of before
};

struct Largest {
  float average, square;
};

TESSERA_INLINE inline void moments(const Segment& segment, const Factors& by, float* average, float* square) {
  const float *values = nearest_code(true).values(), *squares = nearest_code(false).values();
  for (int64_t i = 0; i < segment.length; ++i) {
    const float gradient = segment.gradient[i];
    average[i] = __builtin_fmaf(gradient, by.rest1, values[segment.codes[i]] * segment.absmax * by.beta1);
    square[i] = __builtin_fmaf(by.rest2 * gradient, gradient, squares[segment.squared[i]] * segment.squared_absmax * by.beta2);
  }
}

/// The bits of a float without its sign grow with it; those of NaN are above all others.
TESSERA_INLINE inline uint32_t largest_bits(const float* values, int64_t length) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < length; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, values + i, sizeof(bits));
    bits &= 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

TESSERA_INLINE inline Largest largest_of(const Segment& segment, const Factors& by, float* average, float* square) {
  moments(segment, by, average, square);
  return {std::bit_cast<float>(largest_bits(average, segment.length)),
          std::bit_cast<float>(largest_bits(square, segment.length))};
}

/// What the parameters are to add, and the moments relative to the largest, in their places.
TESSERA_INLINE inline void updates(int64_t length, const Factors& by, const Largest& largest, float* average, float* square,
                                   float* update) {
  constexpr float kLeast = 1e-38F;
  const float by_average = largest.average < kLeast ? kLeast : largest.average;
  const float by_square = largest.square < kLeast ? kLeast : largest.square;
  for (int64_t i = 0; i < length; ++i) {
    update[i] = average[i] / (__builtin_sqrtf(square[i]) / by.root + by.eps) * by.size;
    average[i] = average[i] / by_average;
    square[i] = square[i] / by_square;
  }
}

/// The codes of a signed moment keep its sign.
inline void write_codes(const Segment& segment, const float* average, const float* square) {
  const auto &with_sign = nearest_code(true), &without = nearest_code(false);
  const float* values = with_sign.values();
  for (int64_t i = 0; i < segment.length; ++i) {
    const int code = with_sign(average[i]);
    const bool is_negative = average[i] < 0;
    const int lost = (values[code] < 0) != is_negative ? 1 : 0;
    segment.codes[i] = static_cast<uint8_t>(code + (is_negative ? -lost : lost));
    segment.squared[i] = without(square[i]);
  }
}

struct PlainLanes {
  static Largest largest(const Segment& segment, const Factors& by, float* average, float* square) {
    return largest_of(segment, by, average, square);
  }
  static void update(int64_t length, const Factors& by, const Largest& largest, float* average, float* square, float* update) {
    updates(length, by, largest, average, square, update);
  }
};

#if TESSERA_HAS_WIDE
struct WideLanes {
  TESSERA_AVX2 static Largest largest(const Segment& segment, const Factors& by, float* average, float* square) {
    return largest_of(segment, by, average, square);
  }
  TESSERA_AVX2 static void update(int64_t length, const Factors& by, const Largest& largest, float* average, float* square,
                                  float* update) {
    updates(length, by, largest, average, square, update);
  }
};
#endif

/// The step of one parameter's part, whose elements have type T.
template <typename T, typename Lanes>
class EightBitStep {
 public:
  EightBitStep(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers, const at::Tensor& largest)
      : factors_(numbers),
        decays_(numbers.weight_decay != 0),
        keep_(static_cast<Wide>(1 - numbers.lr * numbers.weight_decay)),
        parameter_(memory.parameter.data_ptr<T>()),
        gradient_(memory.gradient.const_data_ptr<float>()),
        codes_(memory.codes.data_ptr<uint8_t>()),
        squared_(memory.squared_codes.data_ptr<uint8_t>()),
        absmax_(memory.absmax.const_data_ptr<float>()),
        squared_absmax_(memory.squared_absmax.const_data_ptr<float>()),
        largest_(largest.data_ptr<float>()),
        blocks_(largest.size(1)),
        elements_(like.numel()),
        runs_(cut_runs(flat_runs(like), kBlock)) {
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (i == 0 || block_of(i) != block_of(i - 1)) firsts_.push_back(i);
    }
    firsts_.push_back(runs_.size());
  }

  void begin() const {
    for_each_block([&](size_t first, size_t end) {
      Floats average, square;
      if (is_whole(first, end)) return step(first, find(first, average, square), average, square);
      for (size_t i = first; i < end; ++i) find(i, average, square);
    });
  }
  void finish() const {
    for_each_block([&](size_t first, size_t end) {
      if (is_whole(first, end)) return;
      Floats average, square;
      const auto block = block_of(first);
      for (size_t i = first; i < end; ++i) {
        Lanes::largest(segment(i), factors_, average.data(), square.data());
        step(i, {largest_[block], largest_[blocks_ + block]}, average, square);
      }
    });
  }

 private:
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

  int64_t block_of(size_t run) const { return runs_[run].position >> kEightBitBlockBits; }
  /// The runs from `first` to `end` are of one block; whether they are all of it, in one.
  bool is_whole(size_t first, size_t end) const {
    return end == first + 1 && runs_[first].length == std::min(kBlock, elements_ - (block_of(first) << kEightBitBlockBits));
  }
  Segment segment(size_t run) const {
    const auto offset = runs_[run].offset;
    const auto block = block_of(run);
    return {gradient_ + offset, codes_ + offset, squared_ + offset, runs_[run].length, absmax_[block], squared_absmax_[block]};
  }
  template <typename Visit>
  void for_each_block(const Visit& visit) const {
    const auto blocks = static_cast<int64_t>(firsts_.size()) - 1;
    at::parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) visit(firsts_[i], firsts_[i + 1]);
    });
  }
  /// Notes the largest moments of a run among those of its block.
  Largest find(size_t run, Floats& average, Floats& square) const {
    const auto found = Lanes::largest(segment(run), factors_, average.data(), square.data());
    const auto grow = [](float& largest, float with) {
      largest = std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(largest), std::bit_cast<uint32_t>(with)));
    };
    grow(largest_[block_of(run)], found.average);
    grow(largest_[blocks_ + block_of(run)], found.square);
    return found;
  }
  void step(size_t run, const Largest& largest, Floats& average, Floats& square) const {
    Floats update;
    const auto here = segment(run);
    Lanes::update(here.length, factors_, largest, average.data(), square.data(), update.data());
    write_codes(here, average.data(), square.data());
    auto* const parameter = parameter_ + runs_[run].offset;
    for (int64_t i = 0; i < here.length; ++i) {
      const T kept = decays_ ? static_cast<T>(static_cast<Wide>(parameter[i]) * keep_) : parameter[i];
      parameter[i] = static_cast<T>(static_cast<Wide>(kept) + static_cast<Wide>(static_cast<T>(update[i])));
    }
  }

  const Factors factors_;
  const bool decays_;
  const Wide keep_;
  T* const parameter_;
  const float* const gradient_;
  uint8_t *const codes_, *const squared_;
  const float *const absmax_, *const squared_absmax_;
  float* const largest_;
  const int64_t blocks_, elements_;
  const std::vector<FlatRun> runs_;
  std::vector<size_t> firsts_; ///< runs with which the blocks begin
};

template <typename Visit>
void with_step(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers, const at::Tensor& largest,
               const Visit& visit) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, memory.parameter.scalar_type(), "AdamW8bit", [&] {
#if TESSERA_HAS_WIDE
    if (has_avx2()) return visit(EightBitStep<scalar_t, WideLanes>(like, memory, numbers, largest));
#endif
    visit(EightBitStep<scalar_t, PlainLanes>(like, memory, numbers, largest));
  });
}

} // namespace

void begin_eight_bit_step(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers,
                          const at::Tensor& largest) {
  with_step(like, memory, numbers, largest, [](const auto& step) { step.begin(); });
}

void finish_eight_bit_step(const at::Tensor& like, const EightBitMemory& memory, const EightBitNumbers& numbers,
                           const at::Tensor& largest) {
  with_step(like, memory, numbers, largest, [](const auto& step) { step.finish(); });
}

} // namespace tessera::internal
