#include <tessera/dtensor/redistribute/move.h>

#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera::internal {

namespace {

/// Lets a spec travel in an AutogradContext.
struct SpecHolder : torch::CustomClassHolder {
  explicit SpecHolder(SpecPtr s) : spec(std::move(s)) {}
  SpecPtr spec;
};

} // namespace

void check_copy(const at::Tensor& tensor, const DTensorMeta& meta, bool written, std::string_view function) {
  if (C10_LIKELY(!meta.copied_at_version)) return;
  TORCH_CHECK(!written, function,
              ": this view of a DTensor could not alias it, because its data had to move between ranks, or "
              "its part has gaps; writing into it would not reach the original. Its spec is ",
              meta.spec->to_string());
  TORCH_CHECK(
      tensor.is_inference() || tensor._version() == *meta.copied_at_version, function,
      ": the DTensor behind this view was written after the view was taken, and the view could not alias it, because its data "
      "had to move between ranks, or its part has gaps. Take the view again; its spec is ",
      meta.spec->to_string());
}

DTensorMeta& meta_of(const at::Tensor& tensor, const char* function) {
  auto* meta = dtensor_meta(tensor);
  TORCH_CHECK(meta, function, ": this tensor is not a DTensor");
  meta->check_has_values(function);
  check_copy(tensor, *meta, false, function);
  return *meta;
}

at::Tensor in_graph(const at::Tensor& tensor) {
  auto* const meta = dtensor_meta(tensor);
  const auto leaf = meta ? meta->leaf_in_graph(tensor) : at::Tensor();
  return leaf.defined() ? leaf : tensor;
}

bool has_only_zeros(const at::Tensor& plain) { return plain.numel() == 0 || plain.count_nonzero().item<int64_t>() == 0; }

at::Tensor gradient_as_dtensor(const at::Tensor& gradient, const Spec& like, const char* function) {
  if (dtensor_meta(gradient)) return gradient;
  TORCH_CHECK(has_only_zeros(gradient), function, ": this tensor is not a DTensor");
  const Placements replicated(static_cast<size_t>(like.mesh().ndim()));
  return make_dtensor(gradient.contiguous(),
                      Spec::intern(like.mesh(), replicated, gradient.sizes().vec(), gradient.scalar_type()));
}

at::Tensor wrap_moved(at::Tensor local, const at::Tensor& source, const Spec& spec) {
  if (local.is_alias_of(source) || !local.is_contiguous()) local = local.clone(at::MemoryFormat::Contiguous);
  return make_dtensor(std::move(local), Spec::intern(spec.mesh(), spec.placements(), spec.sizes(), spec.dtype()));
}

at::Tensor move(const at::Tensor& tensor, const Placements& placements, const char* label) {
  auto& meta = meta_of(tensor, label);
  const auto target = meta.spec->with(placements);
  if (target == meta.spec) return alias_dtensor(tensor);
  return wrap_moved(redistribute_local(tensor, meta, target, label), meta.local, *target);
}

void save_spec(torch::autograd::AutogradContext* context, const SpecPtr& spec, const char* name) {
  context->saved_data[name] = c10::IValue::make_capsule(c10::make_intrusive<SpecHolder>(spec));
}

SpecPtr saved_spec(torch::autograd::AutogradContext* context, const char* name) {
  return static_cast<SpecHolder*>(context->saved_data[name].toCapsule().get())->spec;
}

} // namespace tessera::internal
