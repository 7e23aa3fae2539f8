#include <tessera/plan/shapes/meta_library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <vector>

namespace tessera::internal::shapes {

namespace {

/// [channels…, size] whose last dims are others.
std::vector<int64_t> with_last(const Tensor& input, IntArrayRef last) {
  auto sizes = input.sizes().vec();
  std::copy(last.begin(), last.end(), sizes.end() - static_cast<std::ptrdiff_t>(last.size()));
  return sizes;
}

Tensor adaptive_average(const Tensor& input, IntArrayRef size) {
  return at::empty(with_last(input, size), input.options(), input.suggest_memory_format());
}
Tensor adaptive_average_backward(const Tensor&, const Tensor& input) {
  return at::empty(input.sizes(), input.options(), input.suggest_memory_format());
}

/// Places where a window fits; with `ceil` also one that ends behind the input.
int64_t places(int64_t size, int64_t window, int64_t stride, int64_t padding, int64_t dilation, bool ceil) {
  const auto room = size + 2 * padding - dilation * (window - 1) - 1;
  auto count = (room + (ceil ? stride - 1 : 0)) / stride + 1;
  if (ceil && (count - 1) * stride >= size + padding) --count; // the last one must not begin in the padding
  return count;
}

Two max_pool3d(const Tensor& input, IntArrayRef window, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
               bool ceil) {
  const auto at = [](IntArrayRef list, size_t i) { return list.size() == 1 ? list[0] : list[i]; };
  std::vector<int64_t> last;
  for (size_t i = 0; i < 3; ++i) {
    const auto step = stride.empty() ? at(window, i) : at(stride, i);
    last.push_back(places(input.size(input.dim() - 3 + static_cast<int64_t>(i)), at(window, i), step, at(padding, i),
                          at(dilation, i), ceil));
  }
  const auto sizes = with_last(input, last);
  const auto format = input.suggest_memory_format();
  return {at::empty(sizes, input.options(), format), at::empty(sizes, input.options().dtype(at::kLong), format)};
}
Tensor max_pool3d_backward(const Tensor&, const Tensor& input, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool,
                           const Tensor&) {
  return at::empty_like(input, input.suggest_memory_format());
}

} // namespace

void add_pools(MetaLibrary& library) {
  for (const auto* name : {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}) library.add(name, adaptive_average);
  for (const auto* name : {"_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"})
    library.add(name, adaptive_average_backward);
  library.add("max_pool3d_with_indices", max_pool3d);
  library.add("max_pool3d_with_indices_backward", max_pool3d_backward);
}

} // namespace tessera::internal::shapes
