#include <tessera/plan/shapes/meta_library.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

namespace tessera::internal::shapes {

namespace {

Tensor of_all(const Tensor& self) { return empty_of(self, {}); }
Tensor dot(const Tensor& self, const Tensor&) { return empty_of(self, {}); }
Tensor product(const Tensor& self, std::optional<at::ScalarType> dtype) {
  const auto own = at::isIntegralType(self.scalar_type(), /*includeBool=*/true) ? at::kLong : self.scalar_type();
  return empty_of(self, {}, dtype.value_or(own));
}

/// A sum has the shape of every reduction.
Tensor reduced(const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&, bool keeps) {
  const auto dtype = at::isComplexType(self.scalar_type()) ? at::toRealValueType(self.scalar_type()) : self.scalar_type();
  return at::sum(self, dims, keeps, dtype);
}
Two reduced_with_mean(const Tensor& self, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>& correction, bool keeps) {
  return {reduced(self, dims, correction, keeps), at::sum(self, dims, keeps, self.scalar_type())};
}

} // namespace

void add_reductions(MetaLibrary& library) {
  for (const auto* name : {"max", "min", "median", "nanmedian"}) library.add(name, of_all);
  for (const auto* name : {"dot", "vdot"}) library.add(name, dot);
  library.add("prod", product);
  for (const auto* name : {"var.correction", "std.correction"}) library.add(name, reduced);
  for (const auto* name : {"var_mean.correction", "std_mean.correction"}) library.add(name, reduced_with_mean);
}

} // namespace tessera::internal::shapes
