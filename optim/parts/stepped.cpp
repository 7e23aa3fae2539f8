#include <tessera/optim/parts/stepped.h>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/tensor/dtensor_impl.h>

namespace tessera::internal {

at::Tensor aligned_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  TORCH_CHECK(gradient.layout() == at::kStrided, "the step of an optimizer: the gradient of a parameter of shape ",
              parameter.sizes(), " is sparse; SGD, Adagrad and SparseAdam's kind of rule take those");
  TORCH_CHECK(!parameter.is_complex(), "the step of an optimizer: a parameter of shape ", parameter.sizes(), " is complex");
  const auto *own = dtensor_meta(parameter), *meta = dtensor_meta(gradient);
  if (const auto pending = dtensor_meta(gradient)) pending->check_has_values("the step of an optimizer");
  auto aligned = gradient;
  if (own && meta && meta->spec != own->spec && meta->spec->placements() != own->spec->placements())
    aligned = DTensor(gradient).redistribute(own->spec->mesh(), own->spec->placements());
  return aligned.scalar_type() == parameter.scalar_type() ? aligned : aligned.to(parameter.scalar_type());
}

// A copy of a tensor to itself moves nothing.
void announce_write(const at::Tensor& parameter) { parameter.copy_(parameter); }

at::Tensor zeros_as(const at::Tensor& parameter, at::ScalarType dtype) {
  const auto* meta = dtensor_meta(parameter);
  if (!meta) return at::zeros_like(parameter, parameter.options().dtype(dtype).requires_grad(false));
  const auto& spec = *meta->spec;
  return make_dtensor(at::zeros_like(meta->local, meta->local.options().dtype(dtype)),
                      Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), dtype, spec.strides()));
}

at::Tensor replicated_zeros(const at::Tensor& parameter, const std::vector<int64_t>& sizes, std::optional<at::ScalarType> dtype) {
  const auto* meta = dtensor_meta(parameter);
  const auto options = parameter.options().dtype(dtype.value_or(parameter.scalar_type())).requires_grad(false);
  if (!meta) return at::zeros(sizes, options);
  const auto& mesh = meta->spec->mesh();
  const auto spec = Spec::intern(mesh, Placements(static_cast<size_t>(mesh.ndim()), Replicate{}), sizes,
                                 c10::typeMetaToScalarType(options.dtype()));
  return make_dtensor(at::zeros(spec->local_sizes(), options.device(meta->local.device())), spec);
}

at::Tensor by_rank_zeros(const at::Tensor& parameter, const std::vector<int64_t>& sizes, at::ScalarType dtype,
                         const std::string& name) {
  const auto* meta = dtensor_meta(parameter);
  const int64_t ranks = meta ? meta->spec->mesh().size() : 1;
  TORCH_CHECK(!sizes.empty() && sizes[0] == ranks, name, " is of ", sizes.empty() ? 0 : sizes[0],
              " ranks, and its parameter lies on ", ranks,
              ": what each rank has for itself, as the error that it feeds back, fits no other number of ranks");
  const auto options = parameter.options().dtype(dtype).requires_grad(false);
  if (!meta) return at::zeros(sizes, options);
  const auto& mesh = meta->spec->mesh();
  const auto spec = Spec::intern(mesh, Placements(static_cast<size_t>(mesh.ndim()), Shard{0}), sizes, dtype);
  return make_dtensor(at::zeros(spec->local_sizes(), options.device(meta->local.device())), spec);
}

} // namespace tessera::internal
