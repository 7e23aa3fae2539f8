#include <tessera/optim/kernels/rounded_adam.h>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include <tessera/optim/kernels/flat_runs.h>
#include <tessera/optim/kernels/wide.h>

namespace tessera::internal {

namespace {

constexpr int64_t kMostElements = 16384; ///< of a run that a thread takes

TESSERA_INLINE inline uint32_t hashed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352DU;
  x = (x ^ (x >> 15)) * 0x846CA68BU;
  return x ^ (x >> 16);
}

/// What the random numbers of one step have in common.
struct Key {
  Key(uint64_t seed, int64_t step)
      : first(hashed(static_cast<uint32_t>(seed)) ^ static_cast<uint32_t>(step)),
        second(hashed(static_cast<uint32_t>(seed >> 32) + 0x9E3779B9U) ^
               static_cast<uint32_t>(static_cast<uint64_t>(step) >> 32)) {
    first = hashed(first);
    second = hashed(second ^ first);
  }
  uint32_t first, second;
};

TESSERA_INLINE inline uint32_t random_of(const Key& key, int64_t position) {
  const auto bits = static_cast<uint64_t>(position);
  return hashed(hashed(static_cast<uint32_t>(bits) ^ key.first) ^ static_cast<uint32_t>(bits >> 32) ^ key.second);
}

TESSERA_INLINE inline uint16_t rounded(float value, uint32_t random) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  constexpr uint32_t kInfinity = 0x7F800000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  const uint32_t sum = (bits + random) >> 16, kept = bits >> 16 | (magnitude > kInfinity ? 0x40U : 0U);
  return static_cast<uint16_t>(magnitude < kInfinity ? sum : kept);
}

TESSERA_INLINE inline float widened(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result = 0;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

/// The numbers of a step, in the type that it computes with.
template <typename Wide>
struct AdamFactors {
  AdamFactors(const FusedAdamSettings& settings, int64_t step)
      : beta1(static_cast<Wide>(settings.beta1)),
        beta2(static_cast<Wide>(settings.beta2)),
        eps(static_cast<Wide>(settings.eps)),
        keep(static_cast<Wide>(settings.decoupled ? 1 - settings.lr * settings.weight_decay : 1)),
        decay(static_cast<Wide>(settings.decoupled ? 0 : settings.weight_decay)),
        size(static_cast<Wide>(settings.lr / (1 - std::pow(settings.beta1, static_cast<double>(step))))),
        root(static_cast<Wide>(std::sqrt(1 - std::pow(settings.beta2, static_cast<double>(step))))) {}
  Wide beta1, beta2, eps, keep, decay, size, root;
};

template <typename T>
using WideOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
struct Elements {
  T* parameter;
  const T* gradient;
  uint16_t *average, *square;
  int64_t position, length;
};

template <typename T>
TESSERA_INLINE inline void step_elements(const Elements<T>& of, const AdamFactors<WideOf<T>>& by, const Key& key) {
  using Wide = WideOf<T>;
  for (int64_t i = 0; i < of.length; ++i) {
    const auto parameter = static_cast<Wide>(of.parameter[i]) * by.keep;
    const Wide gradient = static_cast<Wide>(of.gradient[i]) + by.decay * parameter;
    const Wide average = by.beta1 * widened(of.average[i]) + (1 - by.beta1) * gradient;
    const Wide square = by.beta2 * widened(of.square[i]) + (1 - by.beta2) * gradient * gradient;
    const uint32_t random = random_of(key, of.position + i);
    of.parameter[i] = static_cast<T>(parameter - by.size * average / (std::sqrt(square) / by.root + by.eps));
    of.average[i] = rounded(static_cast<float>(average), random & 0xFFFFU);
    of.square[i] = rounded(static_cast<float>(square), random >> 16);
  }
}

#if TESSERA_HAS_WIDE
template <typename T>
TESSERA_AVX2 void step_wide(const Elements<T>& of, const AdamFactors<WideOf<T>>& by, const Key& key) {
  step_elements(of, by, key);
}
#endif

template <typename T>
void step_some(const Elements<T>& of, const AdamFactors<WideOf<T>>& by, const Key& key) {
#if TESSERA_HAS_WIDE
  if (has_avx2()) return step_wide(of, by, key);
#endif
  step_elements(of, by, key);
}

} // namespace

uint32_t rounding_bits(uint64_t seed, int64_t step, int64_t position) { return random_of(Key(seed, step), position); }

uint16_t round_stochastically(float value, uint32_t random) { return rounded(value, random & 0xFFFFU); }

void rounded_adam_step(const at::Tensor& like, const RoundedAdamMemory& memory, const FusedAdamSettings& settings, int64_t step,
                       uint64_t seed) {
  const auto runs = cut_runs(flat_runs(like), kMostElements);
  const Key key(seed, step);
  auto* const average = reinterpret_cast<uint16_t*>(memory.exp_avg.data_ptr<c10::BFloat16>());
  auto* const square = reinterpret_cast<uint16_t*>(memory.exp_avg_sq.data_ptr<c10::BFloat16>());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, memory.parameter.scalar_type(), "bf16 states", [&] {
    auto* const parameter = memory.parameter.data_ptr<scalar_t>();
    const auto* const gradient = memory.gradient.const_data_ptr<scalar_t>();
    const AdamFactors<WideOf<scalar_t>> factors(settings, step);
    at::parallel_for(0, static_cast<int64_t>(runs.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& [position, offset, length] = runs[static_cast<size_t>(i)];
        step_some<scalar_t>({parameter + offset, gradient + offset, average + offset, square + offset, position, length}, factors,
                            key);
      }
    });
  });
}

} // namespace tessera::internal
