#include <tessera/optim/kernels/flat_values.h>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include <tessera/optim/kernels/wide.h>

namespace tessera::internal {

namespace {

constexpr int64_t kMostElements = 16384; ///< of a run that a thread takes
constexpr int64_t kGrain = 4;            ///< runs that are worth a thread

/// Elements of one tensor that follow one another.
struct FlatPart {
  size_t tensor;
  int64_t first, length;
};

std::vector<FlatPart> flat_parts(const std::vector<at::Tensor>& tensors) {
  std::vector<FlatPart> parts;
  parts.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    for (int64_t first = 0; first < numel; first += kMostElements)
      parts.push_back({i, first, std::min(kMostElements, numel - first)});
  }
  return parts;
}

template <typename Visit> // void(size_t index of a part)
void for_each_part(const std::vector<FlatPart>& parts, int64_t elements, const Visit& visit) {
  const auto count = static_cast<int64_t>(parts.size());
  const int64_t mean = std::max<int64_t>(1, elements / std::max<int64_t>(1, count));
  at::parallel_for(0, count, kGrain * kMostElements / mean, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) visit(static_cast<size_t>(i));
  });
}

int64_t elements_of(const std::vector<at::Tensor>& tensors) {
  int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  return elements;
}

template <typename T>
TESSERA_INLINE inline double squares(const T* values, int64_t length) {
  constexpr int64_t kLanes = 16;
  std::array<double, kLanes> sums{};
  const int64_t whole = length / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      sums[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (int64_t i = whole; i < length; ++i) {
    const auto value = static_cast<double>(values[i]);
    sums[static_cast<size_t>(i - whole)] += value * value;
  }
  double sum = 0;
  for (const double each : sums) sum += each;
  return sum;
}

template <typename T>
TESSERA_INLINE inline void multiply(T* values, int64_t length, T factor) {
  for (int64_t i = 0; i < length; ++i) values[i] *= factor;
}

#if TESSERA_HAS_WIDE
template <typename T>
TESSERA_AVX2 double squares_wide(const T* values, int64_t length) {
  return squares(values, length);
}
template <typename T>
TESSERA_AVX2 void multiply_wide(T* values, int64_t length, T factor) {
  multiply(values, length, factor);
}
#endif

template <typename T>
double squares_of(const T* values, int64_t length) {
#if TESSERA_HAS_WIDE
  if (has_avx2()) return squares_wide(values, length);
#endif
  return squares(values, length);
}

template <typename T>
void multiply_by(T* values, int64_t length, T factor) {
#if TESSERA_HAS_WIDE
  if (has_avx2()) return multiply_wide(values, length, factor);
#endif
  multiply(values, length, factor);
}

double squares_in(const at::Tensor& tensor, const FlatPart& part) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, tensor.scalar_type(), "weighted_squares",
                                         [&] { return squares_of(tensor.const_data_ptr<scalar_t>() + part.first, part.length); });
}

} // namespace

bool is_flat(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && at::isFloatingType(tensor.scalar_type()) &&
         tensor.itemsize() >= 2 && tensor.is_non_overlapping_and_dense() && !tensor.is_neg();
}

double weighted_squares(const std::vector<at::Tensor>& tensors, const std::vector<double>& weights) {
  const auto parts = flat_parts(tensors);
  std::vector<double> sums(parts.size());
  for_each_part(parts, elements_of(tensors), [&](size_t i) { sums[i] = squares_in(tensors[parts[i].tensor], parts[i]); });
  double sum = 0;
  for (size_t i = 0; i < parts.size(); ++i) sum += weights[parts[i].tensor] * sums[i];
  return sum;
}

void multiply_flat(const std::vector<at::Tensor>& tensors, double factor) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr(); // makes a copy that waits for a write, before there are threads
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  const auto parts = flat_parts(tensors);
  for_each_part(parts, elements_of(tensors), [&](size_t i) {
    const auto& tensor = tensors[parts[i].tensor];
    AT_DISPATCH_FLOATING_TYPES(tensor.scalar_type(), "multiply_flat", [&] {
      multiply_by(tensor.mutable_data_ptr<scalar_t>() + parts[i].first, parts[i].length, static_cast<scalar_t>(factor));
    });
  });
}

} // namespace tessera::internal
