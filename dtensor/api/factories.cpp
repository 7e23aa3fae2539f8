#include <tessera/dtensor/factories.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/DefaultDtype.h>

#include <tessera/dtensor/redistribute/redistribute.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera {

namespace {

at::ScalarType dtype_of(const at::TensorOptions& options) { return c10::typeMetaToScalarType(options.dtype()); }

DTensor finish(at::Tensor tensor, const at::TensorOptions& options) {
  if (options.requires_grad()) tensor.set_requires_grad(true);
  return DTensor(std::move(tensor));
}

at::Tensor empty_dtensor(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
                         const at::TensorOptions& options) {
  const auto spec = Spec::intern(mesh, placements, sizes, dtype_of(options));
  return internal::make_dtensor(at::empty(spec->local_sizes(), at::TensorOptions().dtype(spec->dtype()).device(mesh.device())),
                                spec);
}

/// `draw` fills a tensor of the placements, Replicate for Partial: a draw cannot go into a Partial tensor.
template <typename Draw>
DTensor drawn(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options, const Draw& draw) {
  const auto whole = replicate_partial(placements);
  auto result = empty_dtensor(sizes, mesh, whole, options);
  at::NoGradGuard no_grad;
  draw(result);
  if (whole != placements) result = DTensor(result).redistribute(placements);
  return finish(std::move(result), options);
}

} // namespace

DTensor empty(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options) {
  return finish(empty_dtensor(sizes, mesh, placements, options), options);
}

DTensor full(const std::vector<int64_t>& sizes, const at::Scalar& value, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options) {
  auto result = empty_dtensor(sizes, mesh, placements, options);
  const auto& meta = *internal::dtensor_meta(result);
  if (meta.spec->has_partial() && meta.spec->on_mesh()) {
    const auto whole = meta.spec->with(replicate_partial(meta.spec->placements()));
    const auto values = at::full(meta.spec->local_sizes(), value, meta.local.options());
    meta.local.copy_(internal::redistribute_local(values, *whole, *meta.spec, "full"));
  } else {
    meta.local.fill_(value);
  }
  return finish(std::move(result), options);
}

DTensor zeros(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options) {
  return full(sizes, 0, mesh, placements, options);
}

DTensor ones(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options) {
  return full(sizes, 1, mesh, placements, options);
}

DTensor rand(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
             const at::TensorOptions& options) {
  return drawn(sizes, mesh, placements, options, [](at::Tensor& tensor) { tensor.uniform_(); });
}

DTensor randn(const std::vector<int64_t>& sizes, const DeviceMesh& mesh, const Placements& placements,
              const at::TensorOptions& options) {
  return drawn(sizes, mesh, placements, options, [](at::Tensor& tensor) { tensor.normal_(); });
}

} // namespace tessera
