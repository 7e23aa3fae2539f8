#include <tessera/plan/shapes/meta_library.h>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>

namespace tessera::internal::shapes {

namespace {

/// An embedding is one.
Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  TORCH_CHECK_VALUE(index.dim() <= 1, "index_select: the index has the shape ", index.sizes(), ", but must be a vector");
  if (self.dim() == 0) return empty_of(self, {});
  auto sizes = self.sizes().vec();
  sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return empty_of(self, sizes);
}

Tensor embedding_backward(const Tensor& gradient, const Tensor&, int64_t rows, int64_t, bool) {
  const auto contiguous = gradient.expect_contiguous();
  return empty_of(gradient, {rows, gradient.size(-1)});
}

Tensor take(const Tensor& self, const Tensor& index) { return empty_of(self, index.sizes()); }
Tensor flip(const Tensor& self, IntArrayRef) { return elementwise({self}); }
Tensor roll(const Tensor& self, IntArrayRef, IntArrayRef) { return empty_of(self, self.sizes()); }

/// It has as many classes as the call names; those that only the values have are not seen.
Tensor bincount(const Tensor&, const MaybeTensor& weights, int64_t least) {
  const bool weighs = weights && weights->defined();
  const auto dtype = !weighs ? at::kLong : weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
  return at::empty({least}, at::TensorOptions(at::kMeta).dtype(dtype));
}

Tensor repeat_interleave(const Tensor& repeats, std::optional<int64_t> size) {
  TORCH_CHECK_NOT_IMPLEMENTED(size, "repeat_interleave on the meta device needs output_size: the repeats have no values there");
  return empty_of(repeats, {*size});
}

Tensor bucketize(const Tensor& self, const Tensor&, bool narrow, bool) {
  return empty_of(self, self.sizes(), narrow ? at::kInt : at::kLong);
}

} // namespace

void add_indexing(MetaLibrary& library) {
  library.add("index_select", index_select);
  library.add("embedding_dense_backward", embedding_backward);
  library.add("take", take);
  library.add("flip", flip);
  library.add("roll", roll);
  library.add("bincount", bincount);
  library.add("bucketize.Tensor", bucketize);
  library.add("repeat_interleave.Tensor", repeat_interleave);
}

} // namespace tessera::internal::shapes
