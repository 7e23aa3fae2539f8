#include <tessera/plan/shapes/meta_library.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

namespace tessera::internal::shapes {

namespace {

/// A matrix a group on each side, or on one, or the groups beside each other on both, where `ends` says how many there are.
Tensor grouped(const Tensor& a, const Tensor& b, const MaybeTensor& ends, const MaybeTensor&,
               std::optional<at::ScalarType> dtype) {
  const auto out = dtype.value_or(a.scalar_type());
  if (a.dim() == 2 && b.dim() == 2) {
    TORCH_CHECK_VALUE(ends && ends->defined(), "_grouped_mm: two matrices without the ends of their groups");
    return empty_of(a, {ends->numel(), a.size(0), b.size(1)}, out);
  }
  if (a.dim() == 2) return empty_of(a, {a.size(0), b.size(2)}, out);
  if (b.dim() == 2) return empty_of(a, {a.size(1), b.size(1)}, out);
  return empty_of(a, {a.size(0), a.size(1), b.size(2)}, out);
}

Tensor of_integers(const Tensor& a, const Tensor& b) { return empty_of(a, {a.size(0), b.size(1)}, at::kInt); }

/// A copy in fp32, and then one that is scaled.
Tensor widened(const Tensor& codes) { return codes.to(at::kFloat).mul(1.0); }

/// A CPU without instructions for it multiplies copies in fp32.
Tensor scaled(const Tensor& a, const Tensor& b, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
              std::optional<at::ScalarType> dtype, bool) {
  const auto out = dtype.value_or(a.scalar_type());
  if (device_behind_meta() != c10::DeviceType::CPU) return empty_of(a, {a.size(0), b.size(1)}, out);
  const auto left = a.contiguous(), right = b.contiguous();
  auto result = empty_of(a, {a.size(0), b.size(1)}, out);
  const auto wide_left = widened(a), wide_right = widened(right);
  result.copy_(wide_left.mm(wide_right).to(out));
  return result;
}

} // namespace

void add_products(MetaLibrary& library) {
  library.add("_grouped_mm", grouped);
  library.add("_int_mm", of_integers);
  library.add("_scaled_mm", scaled);
}

} // namespace tessera::internal::shapes
